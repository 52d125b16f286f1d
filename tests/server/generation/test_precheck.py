"""Refusals as the official client sees them, and the predicted time to first token of every response."""

from __future__ import annotations

import asyncio
import errno
from unittest.mock import Mock

import httpx
import pytest
from llm_serving.errors import CapacityError, ContextLengthError, RequestError
from llm_serving.server.app import create_app
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from support.fakes import MAX_MODEL_LEN, FakeEngine
from support.server_client import error_of, post


def test_openai_client_gets_a_rate_limit_error_with_retry_after() -> None:
    import openai  # late, as in test_http_server.py

    async def run() -> None:
        engine = FakeEngine(refusal=CapacityError("5 of 5 requests wait in the queue", 2.2, 1500.5, 4.25))
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport) as http_client:
            client = openai.AsyncOpenAI(
                api_key="none", base_url="http://localhost/v1", max_retries=0, http_client=http_client
            )
            with pytest.raises(openai.RateLimitError, match="5 of 5 requests") as refused:
                await client.completions.create(model="demo", prompt="Hello")
        headers = refused.value.response.headers
        assert (headers["retry-after"], headers["retry-after-ms"]) == ("3", "2200")
        assert (
            client._calculate_retry_timeout(1, openai._models.FinalRequestOptions(method="post", url=""), headers)
            == 2.2
        )
        assert headers["x-queue-estimate-ms"] == "1501"
        assert headers["x-predicted-ttft-ms"] == "4250"
        assert refused.value.code == "queue_full"

    asyncio.run(run())


ROUTES = [
    ("/v1/completions", {"model": "demo", "prompt": "Hello"}),
    ("/v1/completions", {"model": "demo", "prompt": ["Hello", "you"], "n": 2}),
    ("/v1/completions", {"model": "demo", "prompt": "Hello", "stream": True}),
    ("/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "Hello"}]}),
    ("/v1/chat/completions", {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "stream": True}),
    ("/generate", {"inputs": "Hello"}),
    ("/generate_stream", {"inputs": "Hello"}),
    ("/models/llama2/generate", {"inputs": "Hello", "parameters": {"max_new_tokens": 5}}),
    ("/models/llama2/generate_stream", {"inputs": "Hello", "parameters": {"max_new_tokens": 5}}),
]


MESSAGES = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.mark.parametrize("path", ["/v1/completions", "/generate", "/v1/messages"])
def test_exhausted_system_resources_are_a_503(path, caplog) -> None:
    body = {"prompt": "x"} if path == "/v1/completions" else {"inputs": "x"}
    body = MESSAGES | {"model": "demo", "max_tokens": 8} if path == "/v1/messages" else body
    for lack in (OSError(errno.EMFILE, "x"), MemoryError(), RuntimeError("can't start new thread")):
        engine = FakeEngine()
        engine.precheck_capacity = Mock(side_effect=lack)  # type: ignore[method-assign]
        response = post(engine, path, body)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert "the machine lacks a resource for this request at the moment: " in response.text
    assert "failed" not in caplog.text


NAMES = [
    ("/v1/chat/completions", MESSAGES, "messages", "max_tokens"),
    ("/v1/chat/completions", MESSAGES | {"max_completion_tokens": 8}, "messages", "max_completion_tokens"),
    ("/v1/messages", MESSAGES | {"model": "demo", "max_tokens": 8}, "messages", "max_tokens"),
    ("/v1/responses", {"model": "demo", "input": "Hello"}, "input", "max_output_tokens"),
    ("/generate", {"inputs": "Hello"}, "inputs", "max_new_tokens"),
    ("/v1/embeddings", {"model": "demo", "input": "Hello"}, "input", None),
    ("/v1/score", {"model": "demo", "text_1": "Hello", "text_2": ["you"]}, "text_2", None),
    ("/v1/rerank", {"model": "demo", "query": "Hello", "documents": ["you"]}, "documents", None),
]


@pytest.mark.parametrize(("path", "body", "prompt", "limit"), NAMES)
def test_engine_errors_use_the_field_names_of_the_protocol(path, body, prompt, limit) -> None:
    for refusal, name in (
        ({"refuses_at_once": ContextLengthError("prompt", "is too long")}, prompt),
        ({"refusal": ContextLengthError("prompt", "is too long")}, prompt),
        ({"refusal": ContextLengthError("max_tokens", "is too much")}, limit),
    ):
        if name is not None:
            assert f"`{name}` is too " in post(FakeEngine(**refusal), path, body).text


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/completions", {"prompt": ["x"] * 3}, "prompt"),
        ("/v1/completions", {"prompt": "x", "n": 2, "best_of": 3}, "best_of"),
        ("/v1/completions", {"prompt": ["x"] * 3, "n": 2}, "n"),
        ("/v1/chat/completions", MESSAGES | {"n": 2}, "n"),
        ("/v1/chat/completions", MESSAGES | {"best_of": 2}, "best_of"),
        ("/v1/embeddings", {"model": "demo", "input": ["x"] * 3}, "input"),
    ],
)
def test_error_for_too_many_choices_names_the_field(path, fields, name) -> None:
    refused = post(FakeEngine(refuses_at_once=RequestError("n", "asks for too many")), path, fields)
    assert f"`{name}` asks for too many" in refused.text


def test_chat_without_max_tokens_needs_room_for_one_token() -> None:
    messages = [{"role": "user", "content": "word " * 2 * MAX_MODEL_LEN}]
    engine = FakeEngine(max_body_bytes=2**20)
    error = error_of(post(engine, "/v1/chat/completions", {"messages": messages}))
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert f"must leave room for an answer within {MAX_MODEL_LEN} tokens" in error["message"]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_responses_have_the_predicted_ttft(path, body) -> None:
    response = post(FakeEngine(predicted_s=0.1234), path, body)
    assert (response.status_code, response.headers["x-predicted-ttft-ms"]) == (200, "124")
    assert "x-predicted-ttft-ms" not in post(FakeEngine(), path, body).headers


FULL = CapacityError("5 of 5 requests wait in the queue", 2.2)


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_precheck_refuses_before_template_and_tokenizer_run(path, body, monkeypatch) -> None:
    engine = FakeEngine(refuses_at_once=FULL)
    touched = []
    for name in ("encode", "apply_chat_template"):
        monkeypatch.setattr(Tokenizer, name, lambda *_, name=name, **__: touched.append(name) or [5])
    response = post(engine, path, body)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert len(engine.prechecks) == 1 and not touched and not engine.submitted


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_precheck_and_submission_name_the_same_source(path, body) -> None:
    engine = FakeEngine()
    checked = []
    engine.precheck_capacity = lambda min_lens, caller: checked.append(caller.source)  # type: ignore[method-assign]
    post(engine, path, body)
    assert checked[0]
    assert {each.source for each in engine.submitted} == {checked[0]}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "word " * 100},
        {"prompt": "Hello", "max_tokens": 125},
        {"prompt": [[5] * 130, [5]]},
    ],
)
def test_precheck_leaves_requests_that_may_never_fit_to_validation(body) -> None:
    engine = FakeEngine(refuses_at_once=FULL)
    assert post(engine, "/v1/completions", body).status_code != 429
    assert not engine.prechecks


def test_precheck_refuses_truncated_prompts() -> None:
    engine = FakeEngine(refuses_at_once=FULL)
    body = {"prompt": "word " * 100, "truncate_prompt_tokens": 10, "n": 3}
    assert post(engine, "/v1/completions", body).status_code == 429
    assert engine.prechecks == [[1, 1, 1]]


def test_precheck_never_overestimates_prompt_lengths() -> None:
    engine = FakeEngine()
    text = "internationalization of answers"
    post(engine, "/v1/completions", {"prompt": text, "max_tokens": 5})
    post(engine, "/v1/completions", {"prompt": [[5, 6], [5, 6, 7]], "max_tokens": 5})
    (least,), exact = engine.prechecks
    assert 1 <= least <= len(engine.tokenizer.encode(text)) and exact == [2, 3]
