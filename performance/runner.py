"""Runs a load: sends each prompt when it is due and keeps a record of every request, answered or not."""

import asyncio
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from arrivals import Send, closed_loop, open_loop
from client import GenerationOptions, count_tokens, generate, server_cpu_s
from http_client import HttpClient
from http_response import HttpError
from records import RequestRecord
from streams import AnswerError
from workload import Prompt, max_tokens


@dataclass(frozen=True)
class Job:
    """A prompt and how many tokens to ask for; `fields` of the body are this request's own."""

    prompt: Prompt
    max_tokens: int
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Load:
    """How requests arrive: `due_times_s` for an open loop, else `concurrency` clients in a closed one."""

    due_times_s: Sequence[float] | None = None
    concurrency: int = 1


@dataclass(frozen=True)
class Run:
    """Records in the order the requests were answered, and the CPU both sides took for them.

    Attributes:
        client_cpu_share: Share of one core that the load generator took.
        server_cpu_s: CPU seconds of the serving process, its WorkAgents aside; None where it does not tell.
    """

    records: list[RequestRecord]
    wall_s: float
    client_cpu_share: float
    server_cpu_s: float | None = None


async def plan(http: HttpClient, prompts: Sequence[Prompt], fixed_max_tokens: int | None) -> list[Job]:
    """Settles the lengths to ask for; the server's tokenizer counts each distinct reference once."""
    if fixed_max_tokens is not None:
        return [Job(prompt, fixed_max_tokens) for prompt in prompts]
    counts: dict[str, int | None] = {}
    for reference in dict.fromkeys(p.reference for p in prompts if p.reference):
        counts[reference] = await count_tokens(http, reference)
        if counts[reference] is None:  # no such route: do not ask a thousand times
            break
    return [Job(prompt, max_tokens(prompt, counts.get(prompt.reference))) for prompt in prompts]


async def run_load(
    http: HttpClient,
    options: GenerationOptions,
    jobs: Sequence[Job],
    load: Load,
    on_record: Callable[[RequestRecord], None],
) -> Run:
    """Sends all jobs and returns when each has been answered or has failed; `on_record` hears of each at once.

    When the run is cancelled, requests not answered by then are recorded as failed.
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
    server_cpu = await server_cpu_s(http) if server_cpu_before is not None else None
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
