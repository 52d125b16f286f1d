"""Real processes: WorkAgents and the master are killed while clients read streams over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
from support.kills import Table
from support.server_process import Server, metric, shared_memory_names, start_server

LONG = " ".join(["Repeat the word stone after me."] * 6)
STREAMS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "Count from 1 to 9.", "temperature": 0},
    "sampled": {"prompt": "Name the days of the week.", "temperature": 0.9, "seed": 11},
    "penalties": {"prompt": "Add 17 and 25.", "temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "top_p": 0.9},
    "logprobs": {"prompt": "Reverse the word lamp.", "temperature": 0, "logprobs": 3},
    "prompt logprobs": {"prompt": LONG, "temperature": 0, "stream": False, "echo": True, "logprobs": 2},
    "n = 3": {"prompt": "Spell the word river.", "temperature": 0.8, "seed": 3, "n": 3},
    "beams": {
        "prompt": "Spell the word cloud.",
        "stream": False,
        "temperature": 0,
        "use_beam_search": True,
        "best_of": 3,
    },
    "chunked": {"prompt": LONG, "temperature": 0},
    "prefix hit": {"prompt": LONG + " Add 1 and 2.", "temperature": 0},
    "batch class": {"prompt": "Sort the words pear apple fig.", "temperature": 0, "priority_class": "batch"},
    "interactive class": {
        "prompt": "Sort the words kiwi plum date.",
        "temperature": 0,
        "priority_class": "interactive",
    },
}
"""Requests by kind of stream. The KV cache below is too small for all of them at once, so some are swapped."""
COMMON = {"max_tokens": 64, "ignore_eos": True, "stream": True}
NUM_KILLS = 3

Progress = list[int]
"""Number of events that all streams have received."""
Stream = asyncio.Task[dict[int, str]]
_REFERENCE: list[dict[int, str]] = []
"""Reference answers to `STREAMS`, each computed alone by the first server; compared with those of all later servers."""
Disturb = Callable[[Server, httpx.AsyncClient, Sequence[Stream], Progress], Awaitable[int]]
"""Kills or stops WorkAgents while the streams run; returns how often."""


@contextmanager
def a_server(num_agents: int) -> Iterator[Server]:
    before = shared_memory_names()
    settings = {
        "pa_config.num_blocks": 36,
        "pa_config.num_swap_blocks": 32,
        "scheduler_config.preemption_mode": "swap",
        "model_config.decode_batch_size": 8,
        "scheduler_config.max_prefill_tokens": 24,
        "serving_config.step_timeout_s": 5.0,
        "device_config.num_threads": 1,
    }
    arguments = itertools.chain.from_iterable(("--set", f"{key}={value}") for key, value in settings.items())
    server = start_server(*arguments, num_agents=num_agents)
    try:
        yield server
    finally:
        server.stop()
    assert not psutil.wait_procs(server.processes, timeout=60)[1]
    assert not shared_memory_names() - before


async def read_stream(client: httpx.AsyncClient, body: dict[str, Any], progress: Progress) -> dict[int, str]:
    """Return the events of each choice joined: text, finish reason, token logprobs."""
    choices: dict[int, str] = {}
    async with client.stream("POST", "/v1/completions", json={**COMMON, **body}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():  # a beam search is not streamed: its answer is one event
            if (data := line.removeprefix("data: ")).startswith("{"):
                event = json.loads(data)
                assert "error" not in event, event
                progress[0] += 1
                for choice in event["choices"]:
                    part = [choice["text"], choice["finish_reason"], (choice["logprobs"] or {}).get("token_logprobs")]
                    choices[choice["index"]] = choices.get(choice["index"], "") + str(part)
    return choices


def start_streams(client: httpx.AsyncClient, progress: Progress) -> list[Stream]:
    return [asyncio.create_task(read_stream(client, body, progress)) for body in STREAMS.values()]


# --- kills of WorkAgents ----------------------------------------------------------------------------------------------


async def kill_and_wait(server: Server, client: httpx.AsyncClient, sent: signal.Signals, index: int = 0) -> None:
    """Send the signal to a WorkAgent and wait until it has been restarted."""
    restarts = await metric(client, "llm_serving:worker_restarts_total")
    agents = server.work_agents()
    agents[index % len(agents)].send_signal(sent)
    while await metric(client, "llm_serving:worker_restarts_total") == restarts:
        await asyncio.sleep(0.3)  # a start takes seconds, and requests compete with it for the cores


def at_intervals(sent: signal.Signals, times: int) -> Disturb:
    """Return a function that sends the signal `times` times, each time after some more events."""

    async def disturb(server: Server, client: httpx.AsyncClient, streams: Sequence[Stream], progress: Progress) -> int:
        for count in range(times):
            target = progress[0] + 70 + 31 * count
            while progress[0] < target:
                if all(stream.done() for stream in streams):
                    return count
                await asyncio.sleep(0.002)
            await kill_and_wait(server, client, sent, count)
        return times

    return disturb


async def in_prefill(server: Server, client: httpx.AsyncClient, streams: Sequence[Stream], progress: Progress) -> int:
    """Kill a WorkAgent as soon as a request runs: usually no client has received a token then."""
    while not await metric(client, "vllm:num_requests_running"):
        if all(stream.done() for stream in streams):
            return 0
        await asyncio.sleep(0)
    await kill_and_wait(server, client, signal.SIGKILL)
    return 1


def check_streams(server: Server, table: Table, disturbances: dict[str, Disturb], *, idle: bool = False) -> None:
    """Run all streams under each disturbance and compare every answer with its reference answer."""

    async def run() -> None:
        async with asyncio.timeout(600), server.client() as client:
            if not _REFERENCE:
                _REFERENCE.extend([await read_stream(client, body, [0]) for body in STREAMS.values()])
            if idle:
                await kill_and_wait(server, client, signal.SIGKILL)
                table.num_kills += 1
                await compare(start_streams(client, [0]), "idle")
            for column, disturb in disturbances.items():
                progress = [0]
                streams = start_streams(client, progress)
                table.num_kills += await disturb(server, client, streams, progress)
                await compare(streams, column)
            table.num_restarts += int(await metric(client, "llm_serving:worker_restarts_total"))
            assert (await client.get("/health")).status_code == 200
            assert await metric(client, "llm_serving:bound_violations_total") == 0
            assert await metric(client, "llm_serving:audit_mismatch_total") == 0

    async def compare(streams: Sequence[Stream], column: str) -> None:
        if column not in table.columns:
            table.columns.append(column)
        for name, stream, expected in zip(STREAMS, streams, _REFERENCE, strict=True):
            table.add(name, column, await stream == expected)

    asyncio.run(run())


# --- tables -----------------------------------------------------------------------------------------------------------


def table_of_one(num_kills: int = NUM_KILLS, num_hangs: int = NUM_KILLS, *, idle: bool = True) -> Table:
    table = Table("real server, one WorkAgent")
    disturbances = {
        "in prefill": in_prefill,
        f"killed {num_kills} times": at_intervals(signal.SIGKILL, num_kills),
        f"hung {num_hangs} times": at_intervals(signal.SIGSTOP, num_hangs),
    }
    with a_server(num_agents=1) as server:
        check_streams(server, table, disturbances, idle=idle)
    return table


def table_of_two(server: Server, num_kills: int = NUM_KILLS) -> Table:
    """Kill the WorkAgents of a server with two of them."""
    table = Table("real server, two WorkAgents")
    disturbances = {"one after the other killed": at_intervals(signal.SIGKILL, num_kills)}
    check_streams(server, table, disturbances, idle=True)
    return table


def end_of_a_master(server: Server, sent: signal.Signals) -> str:
    """Send the signal to the master while all streams run; return how many streams were complete."""
    agents = server.work_agents()

    async def run() -> list[BaseException | dict[int, str]]:
        async with asyncio.timeout(600), server.client() as client:
            progress = [0]
            streams = start_streams(client, progress)
            while progress[0] < 50:
                await asyncio.sleep(0.002)
            server.processes[0].send_signal(sent)
            return await asyncio.gather(*streams, return_exceptions=True)

    ends = asyncio.run(run())
    assert not psutil.wait_procs([server.processes[0], *agents], timeout=60)[1]
    whole = sum(isinstance(each, dict) for each in ends)
    return (
        f"{sent.name} to the master of {len(agents)} WorkAgents: {len(ends)} streams ended, {whole} complete and "
        f"{len(ends) - whole} with an error; no process left"
    )
