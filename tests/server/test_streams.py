"""Streams that resume after a lost connection, or after a restart of the server."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest
from llm_serving.config.tables import ApiKey
from llm_serving.server.idempotency.store import AcceptedRequests, LogFile
from llm_serving.server.middleware.authentication import hash_key
from llm_serving.server.tenant_quota import TenantQuota
from support.gated_server import GatedServer
from support.server_client import error_of

PATH = "/v1/completions"
BODY = {"prompt": "Count to 9.", "max_tokens": 8, "ignore_eos": True, "stream": True, "return_token_ids": True}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8, "ignore_eos": True, "stream": True}
RESUMES = {"resume_streams": True}


def server(**serving) -> GatedServer:
    return GatedServer(serving=RESUMES | serving)


def events_of(text: str) -> list[tuple[str, str]]:
    """Return (id, data) of each event."""
    events = text.split("\n\n")
    assert events.pop() == ""
    pairs = [event.split("\n") for event in events]
    assert all(len(pair) == 2 for pair in pairs)
    return [(event_id.removeprefix("id: "), data.removeprefix("data: ")) for event_id, data in pairs]


def test_streams_without_resume_streams_have_no_event_ids():
    async def run():
        async with GatedServer().running() as client:
            answer = await client.post(PATH, json=BODY)
            assert "id: " not in answer.text
            assert "x-stream-id" not in answer.headers
            assert (await client.get("/v1/streams/abc")).status_code == 404
            again = await client.post(PATH, json=BODY, headers={"Last-Event-ID": "abc:3"})
            assert (again.status_code, error_of(again)["param"]) == (400, "Last-Event-ID")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, BODY),
        (PATH, BODY | {"temperature": 1.0, "n": 2, "stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}}),
        ("/v1/chat/completions", CHAT | {"seed": 7, "n": 3, "logprobs": True}),
    ],
)
def test_stream_resumes_identically_after_every_event(path, body):
    async def run():
        async with server().running() as client:
            answer = await client.post(path, json=body)
            stream_id = answer.headers["x-stream-id"]
            whole = events_of(answer.text)
            assert whole[-1][1] == "[DONE]"
            everything = sorted(data for _, data in whole if "prompt_tokens" not in data)
            for place, (event_id, _) in list(enumerate(whole))[:-1]:
                rest = await client.get(f"/v1/streams/{stream_id}", headers={"Last-Event-ID": event_id})
                assert rest.status_code == 200
                resumed = [*whole[: place + 1], *events_of(rest.text)]
                assert sorted(data for _, data in resumed if "prompt_tokens" not in data) == everything
                assert resumed[-1] == whole[-1]
                if body.get("n", 1) == 1 and "stream_options" not in body:
                    assert events_of(rest.text) == whole[place + 1 :]
            ended = await client.get(f"/v1/streams/{stream_id}", headers={"Last-Event-ID": whole[-1][0]})
            assert (ended.status_code, ended.content) == (204, b"")

    asyncio.run(run())


def test_stream_position_may_be_in_the_query_or_a_repeated_request():
    async def run():
        async with server().running() as client:
            answer = await client.post(PATH, json=BODY)
            stream_id, whole = answer.headers["x-stream-id"], events_of(answer.text)
            rest = await client.get(f"/v1/streams/{stream_id}?resume_from=3")
            assert events_of(rest.text) == whole[3:]
            rest = await client.get(f"/v1/streams/{stream_id}", params={"resume_from": whole[4][0]})
            assert events_of(rest.text) == whole[5:]
            later = await client.get(f"/v1/streams/{stream_id}?resume_from=3", headers={"Last-Event-ID": whole[5][0]})
            assert events_of(later.text) == whole[6:], "an EventSource comes back to the URL it began with"
            assert events_of((await client.get(f"/v1/streams/{stream_id}")).text) == whole
            again = await client.post(PATH, json=BODY, headers={"Last-Event-ID": whole[2][0]})
            assert events_of(again.text) == whole[3:]
            other = await client.post(PATH, json=BODY | {"max_tokens": 7}, headers={"Last-Event-ID": whole[2][0]})
            assert other.status_code == 422

    asyncio.run(run())


@pytest.mark.parametrize("event_id", ["nonsense", "other:3", "1.2", "-1", "9" * 30])
def test_stream_refuses_an_invalid_event_id(event_id):
    async def run():
        async with server().running() as client:
            stream_id = (await client.post(PATH, json=BODY)).headers["x-stream-id"]
            answer = await client.get(f"/v1/streams/{stream_id}", headers={"Last-Event-ID": event_id})
            assert (answer.status_code, error_of(answer)["type"]) == (400, "invalid_request_error")
            unknown = await client.get("/v1/streams/nobody", headers={"Last-Event-ID": event_id})
            assert unknown.status_code in (400, 404)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "position"),
    [(BODY, "9"), (BODY, "99"), (BODY, "8+1"), (BODY | {"n": 2, "seed": 1}, "8.9"), (BODY, "99+1")],
)
def test_stream_refuses_a_position_beyond_its_end(body, position):
    async def run():
        async with server().running() as client:
            stream_id = (await client.post(PATH, json=body)).headers["x-stream-id"]
            event_id = f"{stream_id}:{position}"
            for field, answer in (
                ("Last-Event-ID", await client.get(f"/v1/streams/{stream_id}", headers={"Last-Event-ID": event_id})),
                ("Last-Event-ID", await client.post(PATH, json=body, headers={"Last-Event-ID": event_id})),
                ("resume_from", await client.get(f"/v1/streams/{stream_id}?resume_from={quote(position)}")),
            ):
                assert (answer.status_code, error_of(answer)["param"]) == (400, field)
                rule = "must not be after the last event of the stream"
                assert error_of(answer)["message"] == f"`{field}` {rule}. Given: '{position}'"
                assert answer.headers["x-request-id"]

    asyncio.run(run())


def test_stream_refuses_a_position_of_another_number_of_choices():
    async def run():
        gated = server()
        async with gated.running() as client:
            answer = await client.post(PATH, json=BODY)
            url, last = f"/v1/streams/{answer.headers['x-stream-id']}", events_of(answer.text)[0][0]
            gated.runner.gate.clear()
            for event_id in ("1.2", f"{last}.0"):
                refused = await client.get(url, headers={"Last-Event-ID": event_id})
                assert "must have one number for each of 1 choices" in error_of(refused)["message"]
                again = await client.post(PATH, json=BODY, headers={"Last-Event-ID": f"{last}.0"})
                assert again.status_code == 400
            assert gated.engine.num_running + gated.engine.num_waiting == 0

    asyncio.run(run())


def test_stream_of_an_unreadable_request_is_refused_by_field():
    async def run():
        gated = server()
        async with gated.running() as client:
            stream_id = (await client.post(PATH, json=BODY)).headers["x-stream-id"]
            records = gated.site.routes.accepted._records
            records[stream_id] = msgspec.structs.replace(records[stream_id], request=b'{"prompt": "x", "n": []}')
            answer = await client.get(f"/v1/streams/{stream_id}")
            assert (answer.status_code, error_of(answer)["param"]) == (400, "n")

    asyncio.run(run())


def test_stream_continues_to_be_computed_within_the_grace_period():
    async def run():
        gated = server(resume_grace_s=60.0)
        async with gated.running() as client:
            gated.runner.gate.clear()
            lost = asyncio.create_task(client.post(PATH, json=BODY))
            await gated.reach(lambda: len(gated.site.routes.accepted) == 1)
            (record,) = gated.site.routes.accepted._records.values()
            lost.cancel()
            await gated.reach(lambda: gated.num_readers == 0)
            gated.runner.gate.set()
            rest = await client.get(f"/v1/streams/{record.stream_id}")
            assert events_of(rest.text)[-1][1] == "[DONE]"
            assert gated.num_computed == 8

    asyncio.run(run())


def test_stream_is_resumed_by_its_tenant_only():
    keys = tuple(ApiKey(name=name, key_sha256=hash_key(name * 16), admin=name == "c") for name in "abc")

    def shown(name):
        return {"Authorization": f"Bearer {name * 16}"}

    async def run():
        gated = GatedServer(api_keys=keys, serving=RESUMES)
        async with gated.running() as client:
            answer = await client.post(PATH, json=BODY, headers=shown("a"))
            path = f"/v1/streams/{answer.headers['x-stream-id']}"
            assert (await client.get(path, headers=shown("a"))).text == answer.text
            for other in "bc":
                assert (await client.get(path, headers=shown(other))).status_code == 404
            event_id = {"Last-Event-ID": events_of(answer.text)[0][0]}
            assert (await client.post(PATH, json=BODY, headers=shown("b") | event_id)).status_code == 404
            assert (await client.get(path)).status_code == 401

    asyncio.run(run())


def logged(folder: Path) -> tuple[AcceptedRequests, LogFile]:
    log = LogFile(folder, 2**20)
    accepted = AcceptedRequests(TenantQuota(2**20), 3600.0, time.time)
    for record in log.read():
        accepted.restore(record)
    accepted.log = log
    return accepted, log


@pytest.mark.parametrize("body", [BODY, BODY | {"temperature": 1.0, "n": 2}])
def test_stream_is_recomputed_after_a_restart(tmp_path, body):
    async def ask(act, **serving):
        accepted, log = logged(tmp_path)
        gated = GatedServer(serving=RESUMES | serving, accepted=accepted)
        try:
            async with gated.running() as client:
                return await act(client)
        finally:
            log.close()

    first = asyncio.run(ask(lambda client: client.post(PATH, json=body, headers={"Idempotency-Key": "k"})))
    whole, stream_id = events_of(first.text), first.headers["x-stream-id"]

    def go_on(client):
        return client.get(f"/v1/streams/{stream_id}", headers={"Last-Event-ID": whole[4][0]})

    rest = asyncio.run(ask(go_on))
    assert (
        sorted([*whole[:5], *events_of(rest.text)], key=lambda each: each[1]) == sorted(whole, key=lambda each: each[1])
        or "n" in body
    )
    assert {data for _, data in [*whole[:5], *events_of(rest.text)]} == {data for _, data in whole}
    again = asyncio.run(ask(lambda client: client.post(PATH, json=body, headers={"Idempotency-Key": "k"})))
    assert {data for _, data in events_of(again.text)} == {data for _, data in whole}
    assert again.headers["x-stream-id"] == stream_id


def test_stream_of_another_model_or_configuration_is_not_resumed():
    async def run():
        gated = server()
        async with gated.running() as client:
            answer = await client.post(PATH, json=BODY)
            gated.site.routes.model_state._state += b"x"
            gone = await client.get(f"/v1/streams/{answer.headers['x-stream-id']}")
            assert (gone.status_code, error_of(gone)["code"]) == (410, "gone")

    asyncio.run(run())


def test_stream_resume_while_loading_gets_retry_after():
    """A 410 would tell the client that the stream is lost for ever."""

    async def run():
        gated = server()
        async with gated.running() as client:
            path = f"/v1/streams/{(await client.post(PATH, json=BODY)).headers['x-stream-id']}"
            living, gated.engine.replicas.living = gated.engine.replicas.living, dict
            assert (await client.get(path)).status_code == 503
            gated.engine.replicas.living = living
            assert (await client.get(path)).status_code == 200

    asyncio.run(run())


def test_streams_of_many_choices_have_no_ids():
    async def run():
        async with server().running() as client:
            answer = await client.post(PATH, json=BODY | {"n": 17, "max_tokens": 1})
            assert "id: " not in answer.text

    asyncio.run(run())
