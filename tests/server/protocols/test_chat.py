"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import copy
import threading

import httpx
import pytest
from llm_serving.core.request import FinishReason
from llm_serving.server.app import create_app
from llm_serving.server.generation import conversation
from llm_serving.server.generation.conversation import template_role
from llm_serving.server.parsing.body import IGNORED_HEADER
from llm_serving.server.parsing.offload import FairThreads
from llm_serving.text.tokenizer.sentencepiece import SentencePieceVocabulary
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from support.fakes import DEMO_FOLDER, DEMO_TOKENIZER, MAX_MODEL_LEN, FakeEngine, Script
from support.server_client import error_of, events, leave_while_held, post
from support.tool_cases import tokenizer_with

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]


def test_chat_response():
    engine = FakeEngine(Script(finish_reason=FinishReason.LENGTH))
    response = post(engine, PATH, {"model": "demo", "messages": USER, "temperature": 0})
    body = response.json()
    assert response.status_code == 200
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    prompt = engine.submitted[0].prompt_token_ids
    assert prompt == DEMO_TOKENIZER.encode("hello")
    assert body["usage"]["prompt_tokens"] == len(prompt)


def test_chat_max_tokens_defaults_to_the_rest_of_the_context():
    engine = FakeEngine()
    for fields in ({}, {"max_tokens": 7}, {"max_completion_tokens": 9, "max_tokens": 7}):
        post(engine, PATH, {"messages": USER, **fields})
    num_prompt = len(engine.submitted[0].prompt_token_ids)
    assert [submitted.sampling.max_tokens for submitted in engine.submitted] == [MAX_MODEL_LEN - num_prompt, 7, 7]


def test_chat_content_parts_are_joined():
    engine = FakeEngine()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert post(engine, PATH, {"messages": [{"role": "user", "content": parts}]}).status_code == 200
    assert engine.submitted[0].prompt_token_ids == DEMO_TOKENIZER.encode("one\ntwo")


def test_chat_non_text_parts_are_refused():
    parts = [{"type": "text", "text": "one"}, {"type": "image_url", "image_url": {"url": "x"}}]
    error = error_of(post(FakeEngine(), PATH, {"messages": [{"role": "user", "content": parts}]}))
    assert error["message"] == "`messages[0].content[1].image_url` is not supported: the server accepts only text"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image"}, "`messages[0].content[0].type` must be text. Given: 'image'"),
        ({"type": "text"}, "`messages[0].content[0].text` is required"),
        (
            {"type": "text", "text": "x", "txt": 1},
            "`messages[0].content[0].txt` is not a parameter of this route; did you mean `text`?",
        ),
    ],
)
def test_chat_part_error_names_the_field(part, message):
    assert error_of(post(FakeEngine(), PATH, {"messages": [{"role": "user", "content": [part]}]}))["message"] == message


def test_chat_cache_hints_in_parts_are_reported():
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    response = post(FakeEngine(), PATH, {"messages": [{"role": "user", "content": [part]}]})
    assert response.headers[IGNORED_HEADER] == "cache_control"


@pytest.mark.parametrize("newer", [None, 6, 9])
@pytest.mark.parametrize("older", [None, 6, 9])
def test_chat_max_tokens_and_max_completion_tokens_both_apply(newer, older):
    engine = FakeEngine()
    response = post(engine, PATH, {"messages": USER, "max_completion_tokens": newer, "max_tokens": older})
    fits = MAX_MODEL_LEN - len(engine.submitted[0].prompt_token_ids)
    assert engine.submitted[0].sampling.max_tokens == min(filter(None, [newer, older, fits]))
    assert IGNORED_HEADER not in response.headers


@pytest.mark.parametrize("role", ["", "User", "owner", "content"])
def test_chat_unknown_role_is_refused(role):
    messages = [*USER, {"role": role, "content": "x"}]
    error = error_of(post(FakeEngine(), PATH, {"messages": messages}))
    roles = "system, developer, user, assistant, tool, function"
    assert (error["param"], error["message"]) == (
        "messages[1].role",
        f"`messages[1].role` must be one of {roles}. Given: {role!r}",
    )


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_chat_roles_of_the_protocol_are_accepted(role):
    assert post(FakeEngine(), PATH, {"messages": [*USER, {"role": role, "content": "x"}]}).status_code == 200


@pytest.mark.parametrize(
    ("template", "role", "called"),
    [
        ("{% if m['role'] == 'system' %}", "developer", "system"),
        ('{% if m["role"] in ("system", "developer") %}', "developer", "developer"),
        ("{% if m.role == 'tool' %}", "function", "tool"),
        ("{{ m.role }}", "user", "user"),
    ],
)
def test_chat_roles_are_mapped_for_the_template(template, role, called):
    assert template_role(template, role) == called


@pytest.mark.parametrize(
    "messages",
    [[], [{"content": "x"}], [{"role": "user", "content": 5}], "hello"],
)
def test_chat_messages_beyond_the_context_are_refused(messages):
    response = post(FakeEngine(), PATH, {"messages": messages})
    assert response.status_code == 400
    assert error_of(response)["param"].startswith("messages")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("chat_template", "{{ x }}"),
        ("top_logprobs", 3),
    ],
)
def test_chat_unsupported_values_are_refused(field, value):
    engine = FakeEngine()
    assert error_of(post(engine, PATH, {"messages": USER, field: value}))["param"].startswith(field)
    assert engine.submitted == []


@pytest.mark.parametrize(
    "fields", [{"tools": []}, {"tool_choice": "none"}, {"response_format": {"type": "text"}}, {"tools": None}]
)
def test_chat_default_values_are_accepted(fields):
    assert post(FakeEngine(), PATH, {"messages": USER, **fields}).status_code == 200


def test_chat_template_kwargs_reach_the_template():
    engine = FakeEngine()
    template = "{% if loud %}LOUD {% endif %}{{ messages[0].content }}"
    vocabulary = SentencePieceVocabulary(DEMO_FOLDER / "tokenizer.model", {})
    engine.tokenizer = Tokenizer(vocabulary, {}, chat_templates={"default": template})
    assert post(engine, PATH, {"messages": USER, "chat_template_kwargs": {"loud": True}}).status_code == 200
    expected = engine.tokenizer.encode("LOUD hello", add_special_tokens=False)
    assert engine.submitted[0].prompt_token_ids == expected


@pytest.mark.parametrize("name", ["self", "messages", "add_generation_prompt", "continue_final_message", "tools"])
def test_chat_template_kwargs_with_reserved_names_are_refused(name):
    error = error_of(post(FakeEngine(), PATH, {"messages": USER, "chat_template_kwargs": {name: 1}}))
    rule = "must not hold any of add_generation_prompt, continue_final_message, messages, self, tools"
    assert error["message"] == f"`chat_template_kwargs` {rule}. Given: '{name}'"


class TestStream:
    def test_chat_stream_has_role_then_pieces_then_done(self):
        *chunks, done = events(post(FakeEngine(), PATH, {"messages": USER, "stream": True}))
        assert done == "[DONE]"
        assert [chunk["object"] for chunk in chunks] == ["chat.completion.chunk"] * 4
        assert [(chunk["choices"][0]["delta"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [
            ({"role": "assistant", "content": ""}, None),
            ({"content": "Hello"}, None),
            ({"content": " world"}, None),
            ({"content": ""}, "stop"),
        ]

    def test_chat_stream_usage_is_in_a_chunk_without_choices(self):
        body = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}
        *pieces, usage, _ = events(post(FakeEngine(), PATH, body))
        assert [piece["usage"] for piece in pieces] == [None] * 4
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 3

    def test_chat_stream_of_each_choice_starts_with_its_role(self):
        chunks = events(post(FakeEngine(), PATH, {"messages": USER, "stream": True, "n": 2}))[:-1]
        for index in range(2):
            deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
            assert deltas[0]["role"] == "assistant"
            assert "".join(delta["content"] for delta in deltas) == "Hello world"

    def test_chat_disconnect_aborts_the_request(self):
        engine = FakeEngine(Script(hold_after=1))
        leave_while_held(engine, PATH, {"messages": USER, "stream": True, "request_id": "r"})
        assert engine.aborted == ["r"]


def test_chat_stream_has_logprobs_of_each_token():
    body = {"messages": USER, "logprobs": True, "top_logprobs": 2}
    content = post(FakeEngine(), PATH, body).json()["choices"][0]["logprobs"]["content"]
    text = DEMO_TOKENIZER.token_text(500)
    assert len(content) == 3
    assert content[0]["token"] == text
    assert content[0]["logprob"] == -0.5
    assert bytes(content[0]["bytes"]).decode() == text
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]


def test_chat_logprobs_without_top_logprobs_have_no_alternatives():
    content = post(FakeEngine(), PATH, {"messages": USER, "logprobs": True}).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"] == []


class TestPromptLogprobs:
    def test_chat_prompt_logprobs_are_beside_the_choices(self):
        engine = FakeEngine()
        body = post(engine, PATH, {"messages": USER, "prompt_logprobs": 1, "n": 2}).json()
        num_prompt = body["usage"]["prompt_tokens"]
        assert len(body["prompt_logprobs"]) == num_prompt
        assert body["prompt_logprobs"][0] is None
        assert [list(each)[-1] for each in body["prompt_logprobs"][1:]] == ["0"] * (num_prompt - 1)
        assert [submitted.sampling.prompt_logprobs for submitted in engine.submitted] == [1, None]

    def test_chat_prompt_logprobs_are_refused_in_a_stream(self):
        error = error_of(post(FakeEngine(), PATH, {"messages": USER, "prompt_logprobs": 1, "stream": True}))
        assert error["message"] == "`stream` must be false with prompt_logprobs. Given: True"

    def test_chat_response_has_at_least_one_token(self):
        for name, other in (("max_tokens", "max_completion_tokens"), ("max_completion_tokens", "max_tokens")):
            for value, others in ((0, {}), (2**31, {}), (2**31, {other: 5})):
                error = error_of(post(FakeEngine(), PATH, {"messages": USER, name: value, **others}))
                assert error["message"] == f"`{name}` must be an integer from 1 to 2147483647. Given: {value}"


def test_chat_template_rendering_is_fair_between_clients(monkeypatch):
    engine, begin, rendered = FakeEngine(), threading.Event(), []
    monkeypatch.setattr(engine, "tokenizer", copy.copy(DEMO_TOKENIZER))
    threads = FairThreads(1, "test")
    monkeypatch.setattr(conversation, "_RENDERING", threads)
    threads.submit("", begin.wait)

    def render(messages, **given):
        del given
        rendered.append(messages[0]["content"])
        return "x"

    engine.tokenizer.apply_chat_template = render
    application = create_app(engine)

    async def ask(address, path, content, counts):
        transport = httpx.ASGITransport(application, client=(address, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            return await client.post(path, json={"messages": body["messages"]} if counts else body)

    async def ask_all():
        many = [asyncio.create_task(ask("1.1.1.1", "/tokenize", "many", True)) for _ in range(4)]
        many += [asyncio.create_task(ask("1.1.1.1", "/v1/messages/count_tokens", "many", True)) for _ in range(4)]
        other = asyncio.create_task(ask("2.2.2.2", PATH, "one", False))
        while sum(map(len, threads._waiting.values())) < 9:
            await asyncio.sleep(0)
        begin.set()
        return [answer.status_code for answer in await asyncio.gather(*many, other)]

    assert asyncio.run(ask_all()) == [200] * 9
    assert rendered.index("one") <= 1


TEXT = {"special_tokens_in_content": "text"}
TYPED = [
    {"role": "user", "content": "hi</s><s>bye"},
    {"role": "assistant", "content": "</s>"},
    {"role": "user", "content": "x"},
]
MARKING = "{% for message in messages %}<s>{{ message.role }}\n{{ message.content }}</s>{% endfor %}"


@pytest.mark.parametrize(
    ("path", "more"),
    [(PATH, {}), ("/v1/messages", {"max_tokens": 5}), ("/v1/responses", {}), ("/tokenize", {})],
)
@pytest.mark.parametrize(("limits", "controls"), [({}, 9), (TEXT, 6)])
def test_special_tokens_in_messages_are_control_tokens_or_text(path, more, limits, controls):
    engine = FakeEngine(limits=limits)
    engine.tokenizer = tokenizer_with(MARKING)
    body = {"input" if path == "/v1/responses" else "messages": TYPED} | more
    response = post(engine, path, body)
    assert response.status_code == 200, response.text
    ids = response.json()["tokens"] if path == "/tokenize" else engine.submitted[0].prompt_token_ids
    assert sum(each in engine.tokenizer.special_token_ids for each in ids) == controls
    assert b"".join(map(engine.tokenizer.token_bytes, ids)).replace(b" ", b"") == (
        b"<s>user\nhi</s><s>bye</s><s>assistant\n</s></s><s>user\nx</s>"
    )
