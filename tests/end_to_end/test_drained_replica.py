from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from support.server_process import ONE_THREAD, start_server

pytestmark = pytest.mark.end_to_end

NUM_REQUESTS = 12


def body(number: int) -> dict[str, Any]:
    return {
        "prompt": f"Count from {number} to {number + 9}.",
        "max_tokens": 24 + number,
        "temperature": 1.0,
        "seed": number,
        "ignore_eos": True,
    }


async def ask(client: httpx.AsyncClient, number: int) -> str:
    response = await client.post("/v1/completions", json=body(number))
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


async def reach(client: httpx.AsyncClient, state: str) -> None:
    while (await client.get("/v1/replicas")).json()["replicas"][1]["state"] != state:
        await asyncio.sleep(0.1)


def test_drained_replica_loses_no_request_under_load() -> None:
    server = start_server("--set", "model_config.decode_batch_size=4", "--set", ONE_THREAD, num_agents=2)
    try:

        async def run() -> None:
            async with asyncio.timeout(300), server.client() as client:
                reference = [await ask(client, number) for number in range(NUM_REQUESTS)]
                loaded = [asyncio.create_task(ask(client, number)) for number in range(NUM_REQUESTS)]
                assert (await client.post("/v1/replicas/1/drain")).status_code == 200
                loaded += [asyncio.create_task(ask(client, number)) for number in range(NUM_REQUESTS)]
                await reach(client, "left")
                assert len(server.work_agents()) == 1
                assert (await client.post("/v1/replicas/1/join")).status_code == 200
                await reach(client, "serving")
                loaded += [asyncio.create_task(ask(client, number)) for number in range(NUM_REQUESTS)]
                assert await asyncio.gather(*loaded) == reference * 3
                assert len(server.work_agents()) == 2

        asyncio.run(run())
    finally:
        server.stop()
