"""The real server under load with a tiny cache: the time of every request is told, and is no more than was measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_process import ONE_THREAD, Server, start_server

NUM_REQUESTS = 20


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    sizes = ["--set", "pa_config.num_blocks=24", "--set", "model_config.max_generate_length=256"]
    started = start_server("--model", "demo", "--set", ONE_THREAD, *sizes)
    yield started
    started.stop()


async def complete(client: httpx.AsyncClient, number: int) -> float:
    """Milliseconds from sending a request to the end of its answer."""
    body = {
        "request_id": f"load-{number}",
        "prompt": "Once upon a time there was a king " * (1 + number % 3),
        "max_tokens": 80,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": number % 2 == 0,
        "priority_class": ("interactive", "standard", "batch")[number % 3],
    }
    began = time.monotonic()
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return 1000 * (time.monotonic() - began)


def test_parts_add_up_to_no_more_than_clients_measure(server: Server) -> None:
    async def run() -> tuple[list[float], list[dict[str, Any]], dict[str, Any]]:
        async with server.client() as client:
            measured = await asyncio.gather(*(complete(client, number) for number in range(NUM_REQUESTS)))
            told = []
            for number in range(NUM_REQUESTS):
                [each] = (await client.get(f"/v1/requests/cmpl-load-{number}/explain")).json()["requests"]
                told.append(each)
            return measured, told, (await client.get("/v1/timeline")).json()

    measured, told, trace = asyncio.run(run())
    for milliseconds, each in zip(measured, told, strict=True):
        assert abs(sum(part["ms"] for part in each["parts"]) - each["wall_ms"]) < 1.0
        assert 0.0 < each["wall_ms"] <= milliseconds
        assert {"tokenizing", "prefill", "decode", "sending"} <= {part["what"] for part in each["parts"]}
        assert (each["finish_reason"], each["tokens"]["output"]) == ("length", 80)
    assert sum(each["num_preemptions"] for each in told) > 0
    assert any(part["what"] == "preempted" for each in told for part in each["parts"])
    names = {event["args"].get("name") for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert {"steps", *(each["id"] for each in told)} <= names
