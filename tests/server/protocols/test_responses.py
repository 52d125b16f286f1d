"""OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from llm_serving.core.request import FinishReason
from llm_serving.server.app import create_app
from llm_serving.server.parsing.body import IGNORED_HEADER
from llm_serving.server.protocols.openai.response_store import ResponseStore, StoredResponse
from llm_serving.server.protocols.openai.responses_schemas import ResponseObject
from llm_serving.server.protocols.openai.schemas import ChatMessage
from llm_serving.server.tenant_quota import TenantQuota
from support.fakes import FULL_QUEUE, FakeEngine, Piece, Script
from support.server_client import error_of, leave_while_held, named_events, post, request

PATH = "/v1/responses"


def events(response):
    received = named_events(response)
    assert all(data["type"] == name for name, data in received)
    assert [data["sequence_number"] for _, data in received] == list(range(len(received)))
    return received


def talk(engine, talking):
    """Run `talking` with a client of one application."""

    async def run():
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await talking(client)

    return asyncio.run(run())


def test_response_has_all_fields():
    engine = FakeEngine()
    answer = post(engine, PATH, {"input": "hello", "max_output_tokens": 8, "metadata": {"a": "b"}}).json()
    num_prompt = len(engine.submitted[0].prompt_token_ids)
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["status"], answer["error"]) == ("response", "completed", None)
    [item] = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello world", "annotations": [], "logprobs": []}]
    assert answer["usage"] == {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + 3,
    }
    assert (answer["metadata"], answer["max_output_tokens"], answer["tools"]) == ({"a": "b"}, 8, [])


def test_response_stream_has_all_events_in_order():
    received = events(post(FakeEngine(), PATH, {"input": "hello", "stream": True}))
    assert [name.removeprefix("response.") for name, _ in received] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    data = [each for _, each in received]
    assert (data[0]["response"]["status"], data[0]["response"]["output"]) == ("in_progress", [])
    assert [each["delta"] for each in data[4:6]] == ["Hello", " world"]
    assert data[6]["text"] == data[7]["part"]["text"] == "Hello world"
    assert data[9]["response"]["output"] == [data[8]["item"]]
    assert {each["item_id"] for each in data[3:8]} == {data[8]["item"]["id"]}


@pytest.mark.parametrize(
    ("field", "item", "words"),
    [
        ("type", {"type": "web_search_call"}, "function_call, function_call_output, message, reasoning"),
        ("role", {"role": "owner", "content": "x"}, "assistant, developer, system, user"),
        (
            "content[0].type",
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            "input_text, output_text, reasoning_text, summary_text",
        ),
    ],
)
def test_response_error_lists_the_accepted_values(field, item, words):
    error = error_of(post(FakeEngine(), PATH, {"input": [item]}))
    assert error["param"] == f"input[0].{field}"
    assert f" must be one of {words}. Given: '" in error["message"]


def test_response_at_the_length_limit_is_incomplete():
    engine = FakeEngine(Script(finish_reason=FinishReason.LENGTH))
    answer = post(engine, PATH, {"input": "hello"}).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert events(post(engine, PATH, {"input": "hello", "stream": True}))[-1][0] == "response.incomplete"


def test_failed_response_stream_has_an_error_event():
    script = Script([Piece("a"), Piece("b")], error="the WorkAgent died")
    name, data = events(post(FakeEngine(script), PATH, {"input": "hello", "stream": True}))[-1]
    assert name == "response.failed"
    assert data["response"]["error"] == {"code": "server_error", "message": "the WorkAgent died"}


def test_response_stream_that_fails_at_once_has_the_first_events():
    received = events(post(FakeEngine(Script([Piece("a")], error="gone")), PATH, {"input": "hello", "stream": True}))
    assert [name for name, _ in received] == ["response.created", "response.in_progress", "response.failed"]
    assert [data["response"]["status"] for _, data in received] == ["in_progress", "in_progress", "failed"]


def test_response_input_equals_the_chat_messages():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "message", "id": "msg-1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "well", "annotations": []}]},
        {"role": "user", "content": "world"},
    ]  # fmt: skip
    ours, theirs = FakeEngine(), FakeEngine()
    response = post(ours, PATH, {"input": items, "instructions": "be kind"})
    assert response.headers[IGNORED_HEADER] == "id, status"
    texts = [("system", "be kind"), ("user", "hello"), ("assistant", "well"), ("user", "world")]
    post(theirs, "/v1/chat/completions", {"messages": [{"role": role, "content": text} for role, text in texts]})
    assert ours.submitted[0].prompt_token_ids == theirs.submitted[0].prompt_token_ids


class TestStored:
    def test_stored_response_is_read_continued_and_deleted(self):
        engine, conversations = FakeEngine(), []
        engine.tokenizer = _RecordingTokenizer(engine.tokenizer, conversations)

        async def talking(client):
            first = (await client.post(PATH, json={"input": "hello", "instructions": "be kind"})).json()
            assert (await client.get(f"{PATH}/{first['id']}")).json() == first
            second = await client.post(PATH, json={"input": "more", "previous_response_id": first["id"]})
            assert second.json()["previous_response_id"] == first["id"]
            deleted = (await client.delete(f"{PATH}/{first['id']}")).json()
            assert deleted == {"id": first["id"], "object": "response", "deleted": True}
            assert (await client.get(f"{PATH}/{first['id']}")).status_code == 404
            return await client.post(PATH, json={"input": "more", "previous_response_id": first["id"]})

        gone = talk(engine, talking)
        assert (gone.status_code, error_of(gone)["param"]) == (404, "previous_response_id")
        assert conversations == [
            [("system", "be kind"), ("user", "hello")],
            [("user", "hello"), ("assistant", "Hello world"), ("user", "more")],
        ]

    def test_streamed_response_is_stored_at_its_end(self):
        async def talking(client):
            streamed = events(await client.post(PATH, json={"input": "hello", "stream": True}))
            last = streamed[-1][1]["response"]
            return last, (await client.get(f"{PATH}/{last['id']}")).json()

        assert len(set(map(json.dumps, talk(FakeEngine(), talking)))) == 1

    def test_response_with_store_false_is_not_stored(self):
        async def talking(client):
            answer = (await client.post(PATH, json={"input": "hello", "store": False})).json()
            return await client.get(f"{PATH}/{answer['id']}")

        assert talk(FakeEngine(), talking).status_code == 404

    def test_response_without_a_store_reports_store_false(self):
        engine = FakeEngine(limits={"response_store_bytes": 0})
        assert post(engine, PATH, {"input": "hello"}).json()["store"] is False
        for field in ("store", "background"):
            assert error_of(post(engine, PATH, {"input": "hello", field: True}))["param"] == field

    def test_background_response_continues_after_a_disconnect(self):
        engine = FakeEngine(Script(hold_after=1))

        async def talking(client):
            at_once = (await client.post(PATH, json={"input": "hello", "background": True})).json()
            await engine.held.wait()
            early = await client.post(PATH, json={"input": "more", "previous_response_id": at_once["id"]})
            assert "has ended" in error_of(early)["message"]
            engine.gate.set()
            while (answer := (await client.get(f"{PATH}/{at_once['id']}")).json())["status"] == "in_progress":
                await asyncio.sleep(0)
            return at_once, answer

        at_once, answer = talk(engine, talking)
        assert (at_once["status"], at_once["output"]) == ("in_progress", [])
        assert answer["output"][0]["content"][0]["text"] == "Hello world"

    @pytest.mark.parametrize("method", ["POST", "DELETE"])
    def test_background_response_can_be_cancelled(self, method):
        engine = FakeEngine(Script(hold_after=1))

        async def talking(client):
            answer = (await client.post(PATH, json={"input": "hello", "background": True})).json()
            await engine.held.wait()
            path = f"{PATH}/{answer['id']}"
            return await client.request(method, f"{path}/cancel" if method == "POST" else path)

        answer = talk(engine, talking)
        assert answer.status_code == 200
        assert len(engine.aborted) == 1
        if method == "POST":
            assert answer.json()["status"] == "cancelled"
            assert answer.json()["output"][0]["content"][0]["text"] == "Hello"

    def test_foreground_response_is_not_cancelled_by_id(self):
        async def talking(client):
            answer = (await client.post(PATH, json={"input": "hello"})).json()
            return await client.post(f"{PATH}/{answer['id']}/cancel")

        assert "background" in error_of(talk(FakeEngine(), talking))["message"]

    def test_response_store_evicts_the_oldest(self):
        store = ResponseStore(TenantQuota(3 * 5000))
        for name in "abcd":
            store.add(_stored(name, "me"))
        with pytest.raises(Exception, match="stored"):
            store.find("a", None)
        assert store.find("d", None).response.id == "d"
        store.add(_stored("large", "me", "x" * 5000))
        with pytest.raises(Exception, match="stored"):
            store.find("large", None)
        assert store.find("d", None)

    def test_response_input_items_are_listed_newest_first(self):
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
        given = [
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            call,
            {"type": "function_call_output", "call_id": "c", "output": "4"},
        ]

        async def talking(client):
            first = (await client.post(PATH, json={"input": given, "instructions": "be kind"})).json()
            more = {"input": "more", "previous_response_id": first["id"]}
            path = f"{PATH}/{(await client.post(PATH, json=more)).json()['id']}/input_items"
            pages = [(await client.get(path, params={"limit": 4})).json()]
            while pages[-1]["has_more"]:
                pages.append((await client.get(path, params={"limit": 4, "after": pages[-1]["last_id"]})).json())
            oldest_first = (await client.get(path, params={"order": "asc"})).json()
            refused = [
                await client.get(path, params=each)
                for each in ({"order": "up"}, {"after": "nobody"}, {"limit": 101}, {"include": "x"})
            ]
            return pages, oldest_first, [error_of(each)["param"] for each in refused]

        pages, oldest_first, refused = talk(FakeEngine(), talking)
        assert [len(page["data"]) for page in pages] == [4, 2]
        items = [item for page in pages for item in page["data"]]
        assert len({item["id"] for item in items}) == 6
        assert oldest_first["data"] == items[::-1]
        assert (oldest_first["first_id"], oldest_first["last_id"]) == (items[-1]["id"], items[0]["id"])
        received = [{name: item[name] for name in item.keys() - {"id", "status"}} for item in oldest_first["data"]]
        assert received == [
            {"type": "message", **given[0]},
            given[1],
            call,
            given[3],
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Hello world", "annotations": [], "logprobs": []}],
            },
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "more"}]},
        ]
        assert refused == ["order", "after", "limit", "include"]

    def test_response_too_large_to_store_is_reported(self):
        engine = FakeEngine(limits={"response_store_bytes": 5000})
        large = {"input": "hello " * 50, "max_output_tokens": 8}

        async def talking(client):
            plain = (await client.post(PATH, json=large)).json()
            refused = await client.post(PATH, json=large | {"background": True})
            gone = await client.get(f"{PATH}/{plain['id']}")
            return plain, refused, gone

        plain, refused, gone = talk(engine, talking)
        assert (plain["status"], plain["store"], gone.status_code) == ("completed", False, 404)
        assert (refused.status_code, error_of(refused)["param"]) == (400, "background")
        assert len(engine.aborted) == 1

    def test_background_response_beyond_the_store_fails(self):
        script = Script([Piece("x" * 500), Piece("", 1)], hold_after=1)
        engine = FakeEngine(script, limits={"response_store_bytes": 5000})

        async def talking(client):
            begun = (await client.post(PATH, json={"input": "hello", "background": True})).json()
            await engine.held.wait()
            full = await client.post(PATH, json={"input": "hello", "background": True})
            engine.gate.set()
            while (answer := (await client.get(f"{PATH}/{begun['id']}")).json())["status"] == "in_progress":
                await asyncio.sleep(0)
            return full, answer

        full, answer = talk(engine, talking)
        assert (full.status_code, error_of(full)["code"]) == (429, "store_full")
        assert (answer["status"], answer["error"]["code"], answer["output"]) == ("failed", "too_large", [])

    def test_responses_in_progress_reserve_room_in_the_store(self):
        store = ResponseStore(TenantQuota(3 * 5000))
        begun = [_stored(name, "me") for name in "abc"]
        for each in begun:
            each.response.status = "in_progress"
            store.add_running(each)
        begun[0].response.status, begun[0].answer = "completed", ChatMessage("assistant", "x" * 900)
        store.add(begun[0])
        assert store.find("a", None) is begun[0]

    def test_stored_response_is_hidden_from_other_tenants(self):
        store = ResponseStore(TenantQuota(10**6))
        store.add(_stored("a", "me"))
        assert store.find("a", "me") is store.find("a", None)
        with pytest.raises(Exception, match="stored"):
            store.find("a", "you")


def _stored(name, tenant, text=""):
    response = ResponseObject(id=name, created_at=0, status="completed", model="demo")
    return StoredResponse(response, tenant, [ChatMessage("user", text)])


class _RecordingTokenizer:
    """A tokenizer that records the conversations that it renders."""

    def __init__(self, tokenizer, conversations):
        self._tokenizer, self._conversations = tokenizer, conversations

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, messages, **how):
        self._conversations.append([(message["role"], message["content"]) for message in messages])
        return self._tokenizer.apply_chat_template(messages, **how)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"input": [{"role": "user", "content": "x", "call_id": "1"}]}, "input[0].call_id"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f g"}]}, "tools"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f", "mode": "auto"}}, "tool_choice.mode"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "no"}]}, "input"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"metadata": {"x": "y" * 513}}, "metadata"),
        ({"previous_response_id": "resp-unknown"}, "previous_response_id"),
        ({"unheard": 1}, "unheard"),
    ],
)
def test_unsupported_response_parameters_are_refused(fields, param):
    engine = FakeEngine()
    error = error_of(post(engine, PATH, {"input": "hello", **fields}))
    assert error["param"].startswith(param)
    assert engine.submitted == []


def test_full_queue_refuses_a_response():
    response = post(FakeEngine(refusal=FULL_QUEUE), PATH, {"input": "hello"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "4")


def test_disconnect_aborts_a_response():
    engine = FakeEngine(Script(hold_after=1))
    leave_while_held(engine, PATH, {"input": "hello", "stream": True})
    assert len(engine.aborted) == 1


def test_response_routes_return_404_for_unknown_ids():
    for method, path in (("GET", "x"), ("GET", "x/input_items"), ("DELETE", "x"), ("POST", "x/cancel")):
        assert request(FakeEngine(), method, f"{PATH}/{path}").status_code == 404
