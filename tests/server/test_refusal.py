"""A refusal as the official client sees it, and what every answer tells of its first token."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fakes import FakeEngine
from llm_serving.errors import CapacityError
from llm_serving.server.app import create_app
from llm_serving.text.tokenizer import Tokenizer
from server_client import post


def test_the_openai_client_gets_a_rate_limit_error_with_the_time_to_retry() -> None:
    import openai  # late, as in test_http_server.py

    async def run() -> None:
        engine = FakeEngine(refusal=CapacityError("5 of 5 places in the queue are taken", 2.2, 1500.5, 4.25))
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport) as http_client:
            client = openai.AsyncOpenAI(
                api_key="none", base_url="http://localhost/v1", max_retries=0, http_client=http_client
            )
            with pytest.raises(openai.RateLimitError, match="5 of 5 places") as refused:
                await client.completions.create(model="demo", prompt="Hello")
        headers = refused.value.response.headers
        assert (headers["retry-after"], headers["x-queue-estimate-ms"]) == ("3", "1501")
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


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_every_answer_tells_when_its_first_token_was_expected(path, body) -> None:
    response = post(FakeEngine(predicted_s=0.1234), path, body)
    assert (response.status_code, response.headers["x-predicted-ttft-ms"]) == (200, "124")
    assert "x-predicted-ttft-ms" not in post(FakeEngine(), path, body).headers


def test_the_same_request_of_the_same_client_is_the_same_visitor() -> None:
    def visitor(body, **headers):
        engine = FakeEngine()
        post(
            engine, "/v1/completions", {"model": "demo", "prompt": "Hello", "temperature": 1.0, **body}, headers=headers
        )
        return engine.submitted[0].visitor

    first = visitor({})
    assert first.key and first.source
    assert visitor({}) == first  # though each was given a random seed of its own
    others = [{"prompt": "Hell"}, {"max_tokens": 3}, {"user": "x"}, {"cache_salt": "x"}, {"priority": 1}]
    assert len({first, *(visitor(body) for body in others), visitor({}, **{"Idempotency-Key": "x"})}) == 7


@pytest.mark.parametrize(
    ("count", "says_again"),
    [("0", False), ("00", False), ("3", True), ("", None), ("-1", None), ("x", None), (None, None)],
)
def test_who_says_how_often_it_has_tried_is_heard(count: str | None, says_again: bool | None) -> None:
    engine = FakeEngine()
    headers = {} if count is None else {"x-stainless-retry-count": count}
    post(engine, "/v1/completions", {"model": "demo", "prompt": "Hello"}, headers=headers)
    assert engine.submitted[0].visitor.says_again is says_again


FULL = CapacityError("5 of 5 places in the queue are taken", 2.2)


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_whoever_is_refused_anyhow_costs_no_template_and_no_tokens(path, body, monkeypatch) -> None:
    engine = FakeEngine(refuses_at_once=FULL)
    touched = []
    for name in ("encode", "apply_chat_template"):
        monkeypatch.setattr(Tokenizer, name, lambda *_, name=name, **__: touched.append(name) or [5])
    response = post(engine, path, body)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert len(engine.knocks) == 1 and not touched and not engine.submitted


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_who_knocks_and_who_comes_in_is_the_same_visitor(path, body) -> None:
    engine = FakeEngine()
    knocked = []
    let_in = engine.knock
    engine.knock = lambda num_tokens, caller, visitor: knocked.append(visitor) or let_in(num_tokens, caller, visitor)
    post(engine, path, body)
    assert knocked and knocked[0].key
    assert {each.visitor for each in engine.submitted} == {knocked[0]}


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "word " * 100},
        {"prompt": "Hello", "max_tokens": 125},
        {"prompt": [[5] * 130, [5]]},
    ],
)
def test_who_may_never_fit_is_not_told_to_come_back(body) -> None:
    engine = FakeEngine(refuses_at_once=FULL)
    assert post(engine, "/v1/completions", body).status_code != 429
    assert not engine.knocks


def test_who_is_cut_to_what_fits_is_told_to_come_back() -> None:
    engine = FakeEngine(refuses_at_once=FULL)
    body = {"prompt": "word " * 100, "truncate_prompt_tokens": 10, "n": 3}
    assert post(engine, "/v1/completions", body).status_code == 429
    assert engine.knocks == [[1, 1, 1]]


def test_the_door_is_told_of_no_more_tokens_than_there_are() -> None:
    engine = FakeEngine()
    text = "internationalization of answers"
    post(engine, "/v1/completions", {"prompt": text, "max_tokens": 5})
    post(engine, "/v1/completions", {"prompt": [[5, 6], [5, 6, 7]], "max_tokens": 5})
    (least,), exact = engine.knocks
    assert 1 <= least <= len(engine.tokenizer.encode(text)) and exact == [2, 3]
