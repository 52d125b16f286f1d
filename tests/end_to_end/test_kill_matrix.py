"""WorkAgents are killed or made to hang while they compute every kind of stream; clients notice nothing but time."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest
from server_process import Server, metric, shared_memory_names, start_server

pytestmark = pytest.mark.end_to_end

LONG = " ".join(["Repeat the word stone after me."] * 6)
STREAMS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "Count from 1 to 9.", "temperature": 0},
    "sampled": {"prompt": "Name the days of the week.", "temperature": 0.9, "seed": 11},
    "penalties": {"prompt": "Add 17 and 25.", "temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "top_p": 0.9},
    "logprobs": {"prompt": "Reverse the word lamp.", "temperature": 0, "logprobs": 3},
    "n": {"prompt": "Spell the word river.", "temperature": 0.8, "seed": 3, "n": 3},
    "chunked": {"prompt": LONG, "temperature": 0},
    "prefix": {"prompt": LONG + " Add 1 and 2.", "temperature": 0},
    "batch": {"prompt": "Sort the words pear apple fig.", "temperature": 0, "priority_class": "batch"},
    "interactive": {"prompt": "Sort the words kiwi plum date.", "temperature": 0, "priority_class": "interactive"},
}
"""The cache below is too small for all of them at once, so some are swapped or computed again besides."""
COMMON = {"max_tokens": 100, "ignore_eos": True, "stream": True}
NUM_KILLS = 3

Stream = asyncio.Task[dict[int, str]]


@contextmanager
def a_server(num_agents: int) -> Iterator[Server]:
    before = shared_memory_names()
    settings = {
        "pa_config.num_blocks": 36,
        "pa_config.num_swap_blocks": 32,
        "scheduler_config.preemption_mode": "swap",
        "model_config.decode_batch_size": 8,
        "scheduler_config.max_prefill_tokens": 24,
        "serving_config.step_timeout_s": 2.0,
    }
    arguments = itertools.chain.from_iterable(("--set", f"{key}={value}") for key, value in settings.items())
    server = start_server(*arguments, num_agents=num_agents)
    try:
        yield server
    finally:
        server.stop()
    assert not psutil.wait_procs(server.processes, timeout=10)[1]
    assert shared_memory_names() == before


async def read_stream(client: httpx.AsyncClient, body: dict[str, Any], progress: list[int]) -> dict[int, str]:
    """Each choice's events joined: text, token logprobs, end."""
    choices: dict[int, str] = {}
    async with client.stream("POST", "/v1/completions", json={**COMMON, **body}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                progress[0] += 1
                for choice in event["choices"]:
                    part = [choice["text"], choice["finish_reason"], (choice["logprobs"] or {}).get("token_logprobs")]
                    choices[choice["index"]] = choices.get(choice["index"], "") + str(part)
    return choices


async def answers_alone(client: httpx.AsyncClient) -> list[dict[int, str]]:
    return [await read_stream(client, body, [0]) for body in STREAMS.values()]


async def disturb(
    server: Server, client: httpx.AsyncClient, streams: list[Stream], progress: list[int], sent: signal.Signals
) -> int:
    """Sends the signal to a WorkAgent whenever some more events have come; returns how often."""
    for count in range(NUM_KILLS):
        wanted = progress[0] + 70 + 31 * count
        while progress[0] < wanted:
            if all(stream.done() for stream in streams):
                return count
            await asyncio.sleep(0.002)
        restarts = await metric(client, "llm_serving:worker_restarts_total")
        agents = server.work_agents()
        agents[count % len(agents)].send_signal(sent)
        while await metric(client, "llm_serving:worker_restarts_total") == restarts:
            await asyncio.sleep(0.01)
    return NUM_KILLS


def check_streams(server: Server, *signals: signal.Signals) -> None:
    """Every stream under each signal equals its answer given alone."""

    async def run() -> None:
        async with asyncio.timeout(170), server.client() as client:
            expected = await answers_alone(client)
            for sent in signals:
                progress = [0]
                streams = [asyncio.create_task(read_stream(client, body, progress)) for body in STREAMS.values()]
                assert await disturb(server, client, streams, progress, sent) > 1
                for name, stream, alone in zip(STREAMS, streams, expected, strict=True):
                    assert await stream == alone, (sent, name)
            assert (await client.get("/health")).status_code == 200
            assert await metric(client, "llm_serving:bound_violations_total") == 0

    asyncio.run(run())


def test_one_work_agent_killed_or_hanging() -> None:
    with a_server(num_agents=1) as server:
        check_streams(server, signal.SIGKILL, signal.SIGSTOP)


def test_two_work_agents_killed_in_turn() -> None:
    with a_server(num_agents=2) as server:
        check_streams(server, signal.SIGKILL)
