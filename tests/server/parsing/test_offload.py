"""The number of values in a body is bounded before parsing, and slow work runs off the event loop."""

from __future__ import annotations

import json
import random
import string
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_serving.errors import RequestError
from llm_serving.server.generation import pipeline
from llm_serving.server.generation.conversation import _is_long
from llm_serving.server.parsing import body as request_body
from llm_serving.server.parsing import offload as off_loop_module
from llm_serving.server.parsing.body import MAX_CONTAINERS, MAX_DIGITS, MAX_TEXTS, MAX_VALUES, check_json_limits
from llm_serving.server.parsing.offload import INLINE_BYTES, ITEMS_AT_ONCE, Long, encode_in_parts
from llm_serving.server.protocols.openai.schemas import ChatCompletionRequest, ChatMessage, Function, Tool
from llm_serving.server.routes import ENDPOINTS
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from support.fakes import FakeEngine, Piece, Script
from support.server_client import error_of, post

MANY_NAMES = "{" + ",".join(f'"{i:x}":0' for i in range(300_000)) + "}"
WORST = {
    "chat_template_kwargs of 300,000 names": (
        "/v1/chat/completions",
        '{"messages": [], "chat_template_kwargs": %s}',
        MANY_NAMES,
    ),
    "prompts without ids": ("/v1/completions", '{"prompt": [%s]}', ",".join(["[]"] * 10**6)),
    "prompts without text": ("/v1/completions", '{"prompt": [%s]}', ",".join(['""'] * 10**6)),
    "biases": ("/v1/completions", '{"prompt": "x", "logit_bias": %s}', MANY_NAMES),
    "unknown fields": ("/v1/completions", '{"prompt": "x", "x": %s}', MANY_NAMES),
    "ids": ("/detokenize", '{"tokens": [%s]}', ",".join("1" * 2_000_000)),
    "stop strings": ("/v1/completions", '{"prompt": "x", "stop": [%s]}', ",".join(['"a"'] * 900_000)),
    "messages": ("/v1/chat/completions", '{"messages": [%s]}', ",".join(['{"role":"a"}'] * 300_000)),
    "parts": (
        "/tokenize",
        '{"messages": [{"role": "user", "content": [%s]}]}',
        ",".join(['{"type":"text"}'] * 250_000),
    ),
    "tools": ("/v1/chat/completions", '{"messages": [], "tools": [%s]}', ",".join(["{}"] * 10**6)),
    "numbers of 4,000 digits": (
        "/v1/chat/completions",
        '{"messages": [], "tools": [%s]}',
        ",".join(["9" * 4000] * 1000),
    ),
    "an error behind a million lists": ("/v1/completions", '{"prompt": [%s, {}]}', ",".join(["[]"] * 10**6)),
    "TGI": ("/generate", '{"inputs": "x", "x": %s}', MANY_NAMES),
    "legacy": ("/models/demo", '{"inputs": "x", "x": %s}', MANY_NAMES),
}


@pytest.mark.parametrize(("path", "form", "filling"), WORST.values(), ids=WORST)
def test_body_with_too_many_values_is_refused(path, form, filling, monkeypatch):
    def decode(*arguments: Any, **others: Any) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr(request_body.msgspec.json, "decode", decode)
    body = (form % filling).encode()
    assert len(body) <= 4 * 2**20
    response = post(FakeEngine(max_body_bytes=4 * 2**20), path, body)
    assert response.status_code in (400, 422)
    assert "`body` must hold" in response.text
    assert len(response.content) < 600


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ([[]] * (MAX_CONTAINERS - 1), None),
        ([[]] * MAX_CONTAINERS, f"at most {MAX_CONTAINERS} lists, objects and keys"),
        ([1] * MAX_VALUES, None),
        ([1] * (MAX_VALUES + 1), f"at most {MAX_VALUES} values"),
        ([""] * MAX_TEXTS, None),
        ([""] * (MAX_TEXTS + 1), f"at most {MAX_TEXTS} strings and keys"),
        (int("1" * MAX_DIGITS), None),
        (int("1" * (MAX_DIGITS + 1)), f"numbers of at most {MAX_DIGITS} digits"),
        (["[{,:" * 100_000, "1" * 200_000], None),
        (["\\" * 100_000, '"' * 200_000, "[" * 100_000], None),
    ],
    ids=lambda each: str(each)[:40],
)
def test_json_value_count_ignores_strings(content, rule):
    body = json.dumps(content).encode()
    if rule is None:
        check_json_limits(body)
    else:
        with pytest.raises(RequestError, match=rule):
            check_json_limits(body)


@given(st.lists(st.text(alphabet='\\"[]{},:1', max_size=9), max_size=20))
def test_json_value_count_handles_escapes(texts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_body, "MAX_CONTAINERS", 1)
        check_json_limits(json.dumps([*texts, "x", "x"]).encode())
        with pytest.raises(RequestError, match="at most 1 lists"):
            check_json_limits(json.dumps([*texts, []]).encode())


@pytest.mark.parametrize("endpoint", [each for each in ENDPOINTS if each.body is not None], ids=lambda each: each.path)
def test_long_bodies_are_parsed_off_the_event_loop(endpoint, monkeypatch):
    threads = []

    def decode(*arguments: Any, **others: Any) -> Any:
        threads.append(threading.current_thread())
        raise RequestError("body", "is seen")

    monkeypatch.setattr(request_body, "decode_body", decode)
    path = endpoint.path.replace("{name:path}", "demo").replace("{request_id}", "x").replace("{id}", "x")
    post(FakeEngine(max_body_bytes=2**20), path, b" " * (INLINE_BYTES + 1))
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["hello"] * 500}),
        ("/tokenize", {"prompt": "hello " * 100}),
        ("/generate", {"inputs": "hello " * 100}),
        ("/models/demo", {"inputs": "hello " * 100}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * 100}]}),
        ("/detokenize", {"tokens": [5] * 4000}),
    ],
)
def test_long_texts_are_tokenized_off_the_event_loop(path, body, monkeypatch):
    monkeypatch.setattr(pipeline, "INLINE_CHARS", 200)
    threads = set()
    for name in ("encode", "decode"):
        original = getattr(Tokenizer, name)

        def note(self: Tokenizer, *arguments: Any, original: Any = original, **others: Any) -> Any:
            threads.add(threading.current_thread())
            return original(self, *arguments, **others)

        monkeypatch.setattr(Tokenizer, name, note)
    response = post(FakeEngine(max_body_bytes=2**20), path, body)
    assert threads, response.text
    assert threading.main_thread() not in threads


class Inner(Long):
    name: str
    values: list[int]


class Outer(Long):
    inner: list[Inner]
    rows: list[dict[str, int]]
    nothing: int | msgspec.UnsetType = msgspec.UNSET
    objects: dict[str, Any] = {}  # noqa: RUF012  msgspec copies it


@given(st.integers(0, 3), st.integers(0, 3 * ITEMS_AT_ONCE), st.randoms())
def test_json_in_pieces_equals_json(num_inner: int, num_rows: int, choose: random.Random):
    values = [choose.randrange(10**9) for _ in range(num_rows)]
    name = "".join(choose.choices(string.printable, k=9))
    content = Outer(
        [Inner(name, values)] * num_inner,
        [{"a": value} for value in values],
        objects={"x": values, "y": {"z": [values, []], "t": name}, "e": {}},
    )
    assert encode_in_parts(content) == msgspec.json.encode(content)
    as_dict = json.loads(encode_in_parts(content))
    assert encode_in_parts(as_dict) == msgspec.json.encode(as_dict)


def test_timeline_is_serialized_off_the_event_loop_in_short_calls(monkeypatch):
    from support.server_client import request

    calls = []

    def encode(content: Any) -> bytes:
        calls.append((threading.current_thread(), len(content) if isinstance(content, list) else 1))
        return msgspec.json.encode(content)

    monkeypatch.setattr(off_loop_module, "_encode", encode)
    engine = FakeEngine()
    monkeypatch.setattr(engine, "timeline", lambda *_: {"traceEvents": [{"ph": "M"}] * 9000, "displayTimeUnit": "ms"})
    assert len(request(engine, "GET", "/v1/timeline").json()["traceEvents"]) == 9000
    assert threading.main_thread() not in {thread for thread, _ in calls}
    assert max(length for _, length in calls) == ITEMS_AT_ONCE


def test_errors_of_long_bodies_omit_the_value():
    body = {"prompt": "x" * 100_000, "max_tokens": "many"}
    error = error_of(post(FakeEngine(max_body_bytes=2**20), "/v1/completions", body))
    assert error["message"] == "`max_tokens` is not valid: expected `int | null`, got `str`"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "best_of": 2, "n": 1, "logprobs": 5}),
        ("/v1/completions", {"prompt": "x", "n": 2, "logprobs": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 5}),
        ("/generate", {"inputs": "x", "parameters": {"details": True, "top_n_tokens": 5}}),
    ],
)
def test_long_responses_are_built_off_the_event_loop(path, body, monkeypatch):
    threads = {"write": set(), "read": set()}

    def encode(content: Any) -> bytes:
        threads["write"].add(threading.current_thread())
        return msgspec.json.encode(content)

    original = Tokenizer.token_text

    def token_text(self: Tokenizer, token_id: int) -> str:
        threads["read"].add(threading.current_thread())
        return original(self, token_id)

    monkeypatch.setattr(off_loop_module, "_encode", encode)
    monkeypatch.setattr(Tokenizer, "token_text", token_text)
    response = post(FakeEngine(script=Script((Piece("a", 300), Piece("b")))), path, body)
    assert response.status_code == 200, response.text
    assert threads["write"]
    assert threading.main_thread() not in threads["write"]
    if path != "/generate":  # the event loop reads its events one by one
        assert threads["read"] - {threading.main_thread()}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"tools": [Tool(Function("f", parameters={"enum": ["x" * INLINE_BYTES]}))]}, True),
        ({"chat_template_kwargs": {"a": "x" * INLINE_BYTES}}, True),
        ({"messages": [ChatMessage("assistant", None, reasoning_content="x" * INLINE_BYTES)]}, True),
    ],
)
def test_template_input_size_counts_all_variables(fields, expected):
    request = ChatCompletionRequest(**{"messages": [ChatMessage("user", "x")]} | fields)
    assert _is_long(request) is expected
