"""Runs a load: seeded arrivals, one request at each, and a record of every request, answered or failed.

Open loop: requests arrive by the clock, whether or not the server keeps up, as independent users do. Closed loop: a
fixed number of clients, each of which sends its next request when its last one is answered.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import resource
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from load_test.api_client import AnswerError, GenerationOptions, count_tokens, generate, server_cpu_s
from load_test.http_client import HttpClient, HttpError
from load_test.metrics import RequestRecord
from load_test.workload import Prompt, max_tokens

Send = Callable[[int, float], Coroutine[None, None, None]]
"""Sends request number `index`, due at a `time.perf_counter` second; returns when it is answered."""


def poisson(rate: float, num_requests: int, seed: int) -> list[float]:
    """Return due times in seconds from the start, with independent exponential gaps of mean 1 / `rate`."""
    rng = random.Random(seed)
    return list(itertools.accumulate(rng.expovariate(rate) for _ in range(num_requests)))


def fixed(rate: float, num_requests: int) -> list[float]:
    """Return due times in seconds from the start, 1 / `rate` apart; the first is 0."""
    return [index / rate for index in range(num_requests)]


def burst(rate: float, num_requests: int, burst_size: int) -> list[float]:
    """Return due times in seconds from the start: bursts of `burst_size` requests at the mean `rate`."""
    return [index // burst_size * burst_size / rate for index in range(num_requests)]


async def open_loop(due_times_s: Sequence[float], send: Send) -> None:
    """Start request `i` at `due_times_s[i]` (ascending, seconds from now) and return when all are answered."""
    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for index, offset in enumerate(due_times_s):
            due = start + offset
            delay = due - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.create_task(send(index, due))


async def closed_loop(num_requests: int, concurrency: int, send: Send) -> None:
    """Keep `concurrency` requests in flight until `num_requests` are answered; each is due once its client is idle."""
    indices = iter(range(num_requests))

    async def client() -> None:
        for index in indices:  # the clients share the iterator
            await send(index, time.perf_counter())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, num_requests)):
            tasks.create_task(client())


@dataclass(frozen=True)
class Job:
    """A prompt, its `max_tokens`, and the `fields` of the body that only this request has."""

    prompt: Prompt
    max_tokens: int
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """The arrivals: `due_times_s` for an open loop, else `concurrency` clients in a closed loop."""

    due_times_s: Sequence[float] | None = None
    concurrency: int = 1


@dataclass(frozen=True)
class Run:
    """Records in the order of the responses, and the CPU time of client and server.

    Attributes:
        client_cpu_share: Share of one core that the load generator took.
        server_cpu_s: CPU seconds of the master process without its WorkAgents; None if the server does not report them.
    """

    records: list[RequestRecord]
    wall_s: float
    client_cpu_share: float
    server_cpu_s: float | None = None


async def plan(http: HttpClient, prompts: Sequence[Prompt], fixed_max_tokens: int | None) -> list[Job]:
    """Decide `max_tokens` of each prompt; the server's tokenizer counts each distinct reference once."""
    if fixed_max_tokens is not None:
        return [Job(prompt, fixed_max_tokens) for prompt in prompts]
    counts: dict[str, int | None] = {}
    for reference in dict.fromkeys(p.reference for p in prompts if p.reference):
        counts[reference] = await count_tokens(http, reference)
        if counts[reference] is None:  # the server has no such route
            break
    return [Job(prompt, max_tokens(prompt, counts.get(prompt.reference))) for prompt in prompts]


async def run_load(
    http: HttpClient,
    options: GenerationOptions,
    jobs: Sequence[Job],
    load: Load,
    on_record: Callable[[RequestRecord], None],
) -> Run:
    """Send all jobs and return when each has been answered or has failed; `on_record` is called for each at once.

    If the run is cancelled, unanswered requests are recorded as failed.
    """
    server_cpu_before = await server_cpu_s(http)
    start = time.perf_counter()
    records: dict[int, RequestRecord] = {}

    def keep(record: RequestRecord) -> None:
        records[record.index] = record
        on_record(record)

    async def send(index: int, due: float) -> None:
        keep(await _send(http, options, index, jobs[index], start, due))

    cpu_before = _cpu_s()
    try:
        await _drive(load, len(jobs), send)
    except asyncio.CancelledError:
        if task := asyncio.current_task():
            task.uncancel()
        now = time.perf_counter() - start
        for index, job in enumerate(jobs):
            if index not in records:
                keep(_failed(index, job, now, now, now, "the run was interrupted"))
    wall_s = time.perf_counter() - start
    client_cpu_share = (_cpu_s() - cpu_before) / wall_s
    server_cpu = None
    if server_cpu_before is not None:
        with suppress(HttpError):  # keep the records if the server ended during the run
            server_cpu = await server_cpu_s(http)
    taken = None if server_cpu is None or server_cpu_before is None else server_cpu - server_cpu_before
    return Run(list(records.values()), wall_s, client_cpu_share, taken)


async def _drive(load: Load, num_requests: int, send: Send) -> None:
    if load.due_times_s is not None:
        await open_loop(load.due_times_s, send)
    else:
        await closed_loop(num_requests, load.concurrency, send)


async def _send(
    http: HttpClient, options: GenerationOptions, index: int, job: Job, start: float, due: float
) -> RequestRecord:
    sent = time.perf_counter()
    try:
        result = await generate(http, options, job.prompt.text, job.max_tokens, job.fields)
    except (HttpError, AnswerError) as error:
        return _failed(index, job, due - start, sent - start, time.perf_counter() - start, str(error))
    answer = result.answer
    return RequestRecord(
        index=index,
        prompt=job.prompt.text,
        task=job.prompt.task,
        expected=job.prompt.expected,
        due_s=due - start,
        sent_s=sent - start,
        end_s=result.end_s - start,
        token_times_s=tuple(time_s - start for time_s in answer.token_times_s),
        num_output_tokens=answer.num_output_tokens,
        text=answer.text,
        finish_reason=answer.finish_reason,
        num_retries=result.num_retries,
        attempts=tuple(replace(each, sent_s=each.sent_s - start) for each in result.attempts),
    )


def _failed(index: int, job: Job, due_s: float, sent_s: float, end_s: float, error: str) -> RequestRecord:
    prompt = job.prompt
    return RequestRecord(index, prompt.text, prompt.task, prompt.expected, due_s, sent_s, end_s, error=error)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
