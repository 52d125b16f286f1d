"""A refusal as the official client sees it."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
from fakes import FakeEngine
from llm_serving.errors import CapacityError
from llm_serving.server.app import create_app


def test_the_openai_client_gets_a_rate_limit_error_with_the_time_to_retry() -> None:
    async def run() -> None:
        engine = FakeEngine(refusal=CapacityError("5 of 5 places in the queue are taken", 2.2, 1500.5))
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport) as http_client:
            client = openai.AsyncOpenAI(
                api_key="none", base_url="http://server/v1", max_retries=0, http_client=http_client
            )
            with pytest.raises(openai.RateLimitError, match="5 of 5 places") as refused:
                await client.completions.create(model="demo", prompt="Hello")
        headers = refused.value.response.headers
        assert (headers["retry-after"], headers["x-queue-estimate-ms"]) == ("3", "1501")
        assert refused.value.code == "queue_full"

    asyncio.run(run())
