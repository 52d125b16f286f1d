"""Unsupported fields are refused by name, or ignored and reported; never ignored silently."""

from __future__ import annotations

import json

import pytest
from llm_serving.server.parsing.body import IGNORED_HEADER, MAX_NAMED, fields_of
from llm_serving.server.parsing.unsupported_fields import UNSUPPORTED, IgnoredField, RefusedField
from llm_serving.server.protocols.anthropic.schemas import ResultBlock
from llm_serving.server.protocols.openai.schemas import ChatMessage, ContentPart, Function
from llm_serving.server.protocols.openai.vector_schemas import TextDocument
from llm_serving.server.protocols.text_schemas import TGIParameters
from llm_serving.server.routes import ENDPOINTS
from support.fakes import FakeEngine
from support.server_client import error_of, post

CHAT = {"messages": [{"role": "user", "content": "x"}]}
ROUTES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": CHAT,
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
    "/generate": {"inputs": "x"},
}
SOMETHING = {"asks": "for something"}


def refused(path, body):
    engine = FakeEngine()
    response = post(engine, path, body)
    assert response.status_code in (400, 422)
    assert engine.submitted == []
    return response.json()["error"]


def bodies_of(kind: type) -> list[type]:
    return [kind, *(each for part in fields_of(kind).values() if part is not None for each in bodies_of(part))]


def test_unsupported_field_tables_are_of_bodies():
    kinds = {kind for endpoint in ENDPOINTS if endpoint.body for kind in bodies_of(endpoint.body)}
    assert {ChatMessage, Function, ContentPart, ResultBlock, TextDocument, TGIParameters} <= kinds
    assert set(UNSUPPORTED) <= kinds
    for kind, rules in UNSUPPORTED.items():
        assert not fields_of(kind).keys() & rules.keys()


OPENAI = [("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)]
ROWS = [
    (path, usual, name, row)
    for path, usual in OPENAI
    for endpoint in ENDPOINTS
    if endpoint.path == path
    for name, row in UNSUPPORTED[endpoint.body].items()
]


@pytest.mark.parametrize(("path", "usual", "name", "row"), ROWS, ids=lambda each: each if isinstance(each, str) else "")
def test_unsupported_fields_are_refused_or_reported(path, usual, name, row):
    response = post(FakeEngine(), path, {**usual, name: SOMETHING})
    if isinstance(row, RefusedField):
        assert error_of(response)["param"] == name
        for neutral in (None, *(() if row.empty_asks else ([], {})), *row.neutral):
            response = post(FakeEngine(), path, {**usual, name: neutral})
            assert response.status_code == 200
            assert IGNORED_HEADER not in response.headers
    else:
        assert isinstance(row, IgnoredField)
        assert response.headers[IGNORED_HEADER] == name


def test_empty_options_object_counts_as_given():
    error = error_of(post(FakeEngine(), "/v1/chat/completions", {**CHAT, "web_search_options": {}}))
    assert error["message"] == "`web_search_options` is not supported: the server has no web search"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temprature", 0), ("grammar", "root ::= x"),
        ("structural_tag", "x"), ("documents", [{"text": "x"}]), ("logits_processors", ["x"]), ("lora_request", "x"),
        ("no_repeat_ngram_size", 2), ("typical_p", 0.5), ("max_new_tokens", 5), ("min_new_tokens", 5),
        ("stop_sequences", ["x"]), ("do_sample", False),
        ("spaces_between_special_tokens", False),
    ],
)  # fmt: skip
def test_formerly_ignored_fields_are_refused(field, value):
    for path, usual in OPENAI:
        assert refused(path, {**usual, field: value})["param"] == field


@pytest.mark.parametrize("path", ROUTES)
def test_unknown_field_is_refused(path):
    error = refused(path, {**ROUTES[path], "x" * 3000: 1})
    assert "is not a parameter of this route" in str(error)
    assert len(str(error)) < 400
    assert post(FakeEngine(), path, {**ROUTES[path], "unheard": None}).status_code == 200


def test_unknown_field_error_suggests_the_nearest_name():
    assert refused("/v1/completions", {"prompt": "x", "temprature": 0})["message"] == (
        "`temprature` is not a parameter of this route; did you mean `temperature`?"
    )


def test_unknown_field_error_names_the_equivalent_field():
    message = refused("/v1/completions", {"prompt": "x", "max_new_tokens": 4})["message"]
    assert message == "`max_new_tokens` is not a parameter of this route; `max_tokens` is"


@pytest.mark.parametrize("extra", [{}, {"stream": True}])
def test_ignored_fields_are_reported_in_order(extra):
    body = {"metadata": {"a": "b"}, "prompt": "x", "store": True, "service_tier": "auto", **extra}
    assert post(FakeEngine(), "/v1/completions", body).headers[IGNORED_HEADER] == "metadata, store, service_tier"


@pytest.mark.parametrize(("path", "usual"), OPENAI)
def test_unsupported_stream_options_are_refused(path, usual):
    error = refused(path, {**usual, "stream": True, "stream_options": {"include_usge": True}})
    assert (error["param"], error["message"].partition("; ")[2]) == (
        "stream_options.include_usge",
        "did you mean `include_usage`?",
    )
    response = post(FakeEngine(), path, {**usual, "stream": True, "stream_options": {"include_obfuscation": False}})
    assert response.headers[IGNORED_HEADER] == "include_obfuscation"


class TestMessages:
    @pytest.mark.parametrize("field", ["tool_call_id", "function_call", "audio", "unheard"])
    def test_unsupported_message_fields_are_refused(self, field):
        message = {"role": "assistant", "content": "x", field: [{"id": "1"}]}
        assert refused("/v1/chat/completions", {"messages": [*CHAT["messages"], message]})["param"] == (
            f"messages[1].{field}"
        )

    def test_response_message_is_accepted_as_input(self):
        answer = post(FakeEngine(), "/v1/chat/completions", CHAT).json()["choices"][0]["message"]
        library = {"tool_calls": None, "function_call": None, "audio": None, "annotations": []}
        messages = [*CHAT["messages"], answer | library, *CHAT["messages"]]
        assert post(FakeEngine(), "/v1/chat/completions", {"messages": messages}).status_code == 200


class TestTgi:
    @pytest.mark.parametrize("field", ["watermark", "max_tokens", "unheard"])
    def test_unsupported_values_are_refused(self, field):
        assert f"`{field}`" in refused("/generate", {"inputs": "x", "parameters": {field: SOMETHING}})

    def test_default_fields_of_client_libraries_are_accepted(self):
        parameters = {"adapter_id": None, "best_of": None, "decoder_input_details": False, "details": True}
        parameters |= {"watermark": False, "typical_p": None, "grammar": None, "stop": [], "do_sample": False}
        response = post(FakeEngine(), "/generate", {"inputs": "x", "parameters": parameters, "stream": False})
        assert response.status_code == 200


class TestLegacy:
    def test_fields_without_effect_are_reported(self):
        parameters = {"max_new_tokens": 5, "watermark": False, "truncate": None, "typical_p": 0.5, "unheard": 1}
        response = post(FakeEngine(), "/models/demo", {"inputs": "x", "parameters": parameters, "\n: x": 1})
        assert response.status_code == 200
        assert response.headers[IGNORED_HEADER] == "watermark, typical_p, unheard, and 1 more"

    def test_ignored_fields_header_is_bounded(self):
        parameters = {f"field{i}": i for i in range(1, 100)}
        response = post(FakeEngine(), "/models/demo", {"inputs": "x", "parameters": parameters | {"max_new_tokens": 5}})
        assert response.headers[IGNORED_HEADER].count(",") == MAX_NAMED


@pytest.mark.parametrize("value", [b"1e400", b"[1e400]", b"-1e999"])
def test_number_beyond_float_error_names_the_field(value):
    response = post(FakeEngine(), "/tokenize", b'{"prompt": "hello", "mirostat": ' + value + b"}")
    assert (response.status_code, error_of(response)["param"]) == (400, "mirostat")


def test_field_name_with_lone_surrogates_is_refused():
    response = post(FakeEngine(), "/v1/completions", b'{"prompt": "hello", "a\xff": null}')
    assert (response.status_code, error_of(response)["param"]) == (400, "body")


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", '{"prompt": "x", "n": 1, "n": 2}', "`n` must be given once"),
        ("/v1/completions", r'{"prompt": "x", "n": 1, "\u006e": 2}', "`n` must be given once"),
        ("/v1/completions", '{"prompt": "x", "store": 1, "store": 2}', "`store` must be given once"),
        (
            "/v1/chat/completions",
            '{"messages": [{"role": "user", "content": "a:b", "content": "c"}]}',
            "`messages[0].content` must be given once",
        ),
        (
            "/v1/completions",
            '{"prompt": "x", "logit_bias": {"5": 1, "5": 2}}',
            "`logit_bias` must not have the name '5' twice",
        ),
        (
            "/v1/completions",
            '{"prompt": "x", "guided_json": {"properties": {"a": {"type": "string", "type": "integer"}}}}',
            "`guided_json` must not have the name 'type' twice",
        ),
        (
            "/generate",
            '{"inputs": "x", "parameters": {"top_k": 1, "top_k": 2}}',
            "`top_k` must be given once",
        ),
    ],
)
def test_duplicate_field_error_names_the_field(path, body, message):
    engine = FakeEngine()
    response = post(engine, path, body.encode())
    assert response.status_code in (400, 422)
    assert message in json.dumps(response.json()).replace('\\"', '"')
    assert engine.submitted == []


def test_repeated_names_in_other_objects_are_accepted():
    schema = {"properties": {"a:": {"type": "string"}, "b": {"type": "string", "const": ":::"}}}
    message = {"role": "user", "content": 'role: content: {"role": 1}'}
    body = {"messages": [message, {"role": "assistant", "content": "x"}, message], "guided_json": schema}
    body |= {"chat_template_kwargs": {"::": 1, "role": [{"role": 1.5e300}, {"role": 2}]}, "max_tokens": 8}
    assert post(FakeEngine(max_body_bytes=2**16), "/v1/chat/completions", body).status_code == 200
