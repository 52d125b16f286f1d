"""A refusal as the official client sees it, and what every answer tells of its first token."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
from fakes import FakeEngine
from llm_serving.errors import CapacityError
from llm_serving.server.app import create_app
from server_client import post


def test_the_openai_client_gets_a_rate_limit_error_with_the_time_to_retry() -> None:
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
