"""Malicious bodies: each is refused with a short error that names the field, and nothing runs."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from llm_serving.core.sampling_params import MAX_STOP_TOKEN_IDS
from llm_serving.server.app import create_app
from support.fakes import FakeEngine
from support.server_client import error_of, post

COMPLETIONS = "/v1/completions"


def refused(body, path=COMPLETIONS, status=400):
    engine = FakeEngine()
    response = post(engine, path, body)
    assert response.status_code == status
    assert engine.submitted == []
    assert len(response.content) < 600
    return error_of(response)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 2**63),
        ("max_tokens", 10**300),
        ("max_tokens", 1.5),
        ("max_tokens", "many"),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", 101),
        ("temperature", [1]),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 2**31),
        ("min_p", -1),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("n", 0),
        ("n", 129),
        ("n", 2**40),
        ("logprobs", 21),
        ("logprobs", -1),
        ("stop", ["x"] * 17),
        ("stop", ["x" * 257]),
        ("stop", [""]),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", list(range(129))),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"9999999999": 1}),
        ("logit_bias", [1]),
        ("stream", "perhaps"),
        ("stream_options", 5),
        ("priority", 1.5),
        ("echo", 7),
        ("model", {"a": 1}),
    ],
)
def test_out_of_range_values_are_refused(field, value):
    assert field in refused({"prompt": "x", field: value})["param"]


def test_error_has_field_rule_and_value():
    error = refused({"prompt": "x", "top_p": 1.5})
    assert error["message"] == "`top_p` must be above 0.0 and at most 1.0. Given: 1.5"
    error = refused({"prompt": "x", "max_tokens": "many"})
    assert error["message"] == "`max_tokens` is not valid: expected `int | null`, got `str`. Given: 'many'"
    assert refused({"model": "demo"})["message"] == "`prompt` is required"


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("logit_bias", b'{"5": "x"}', "is not valid: expected `float`, got `str`. Given: {'5': 'x'}"),
        ("structured_outputs", b'{"json": {"minimum": 1e400}}', "is not valid: number out of range"),
    ],
)
def test_error_names_the_field_of_a_nested_value(field, value, rule):
    body = b'{"prompt": "x", "' + field.encode() + b'": ' + value + b"}"
    error = error_of(post(FakeEngine(), "/v1/completions", body))
    assert (error["param"], error["message"]) == (field, f"`{field}` {rule}")


def test_large_value_is_not_echoed():
    error = refused({"prompt": "x", "max_tokens": "y" * 3000})
    assert "yyyy" in error["message"]
    assert len(error["message"]) < 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": -Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x"} trailing',
        b'{"prompt": ' + b"[" * 1500 + b"]" * 1500 + b"}",
        b'{"max_tokens": ' + b"9" * 3000 + b', "prompt": "x"}',
        b'{"prompt": "x", "a\\u0000": 1, "max_tokens": {}}',
    ],
)
def test_malformed_json_is_refused(body):
    refused(body)


def test_deeply_nested_json_is_refused():
    deep = b"[" * 30_000 + b"]" * 30_000
    response = post(FakeEngine(max_body_bytes=2**20), COMPLETIONS, b'{"prompt": "x", "other": ' + deep + b"}")
    assert error_of(response)["message"] == "`body` is nested too deeply to be decoded"


def test_logit_bias_above_the_limit_is_refused():
    body = {"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}
    response = post(FakeEngine(max_body_bytes=2**20), COMPLETIONS, body)
    assert error_of(response)["message"] == "`logit_bias` must hold at most 1024 tokens. Given: 1025"


def test_maximum_number_of_stop_token_ids_is_accepted():
    engine = FakeEngine()
    post(engine, COMPLETIONS, {"prompt": "x", "stop_token_ids": list(range(MAX_STOP_TOKEN_IDS))})
    assert engine.submitted[0].sampling.stop_token_ids == tuple(range(MAX_STOP_TOKEN_IDS))


def test_long_body_is_refused_by_its_declared_length():
    assert refused(b'{"prompt": "' + b"x" * 5000 + b'"}', status=413)["message"] == "`body` must be at most 4096 bytes"


def test_long_body_without_declared_length_is_refused_while_read():
    engine = FakeEngine()
    num_sent = 0

    async def chunks():
        nonlocal num_sent
        for _ in range(1000):
            num_sent += 1
            yield b"x" * 1000

    async def send():
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.post(COMPLETIONS, content=chunks())

    response = asyncio.run(send())
    assert response.status_code == 413
    assert num_sent == 5
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize("path", ["/generate", "/models/demo", "/tokenize", "/detokenize", "/v1/chat/completions"])
def test_every_route_limits_its_body(path):
    assert post(FakeEngine(), path, b"x" * 5000).status_code == 413


@pytest.mark.parametrize("path", ["/generate", "/models/demo", "/tokenize", "/detokenize", "/v1/chat/completions"])
@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'"text"', b'{"inputs": 5}', b'{"prompt": {}, "tokens": "x"}'])
def test_no_route_answers_a_broken_body_with_a_server_error(path, body):
    assert post(FakeEngine(), path, body).status_code in (400, 422)


def test_number_of_prompts_times_n_is_limited():
    engine = FakeEngine()
    response = post(engine, COMPLETIONS, {"prompt": ["x"] * 100, "n": 6})
    assert error_of(response)["message"] == "`n` times the number of prompts must be at most 512. Given: 600"
    response = post(engine, COMPLETIONS, {"prompt": [[1]] * 600})
    assert error_of(response)["message"] == "`prompt` must hold at most 512 prompts. Given: 600"
    assert engine.submitted == []


@pytest.mark.parametrize("tokens", [[-1], [2048], [2**63], [10**30]])
def test_detokenize_refuses_ids_outside_the_vocabulary(tokens):
    response = post(FakeEngine(), "/detokenize", {"tokens": tokens})
    assert error_of(response)["message"].startswith("`tokens` must hold token ids from 0 to 2047. Given: ")
