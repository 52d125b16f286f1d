"""Snapshots of a scheduler and its engine, copied by the engine's thread for other threads to read.

`take_snapshot` adds what happened since a time, for viewers. A snapshot does not change; its times are seconds before
it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple

from msgspec import Struct

from llm_serving.core.request import Request
from llm_serving.core.request_class import RequestClass
from llm_serving.core.timings import Clock
from llm_serving.kvcache import BlockManager
from llm_serving.observability.event_log import EventLog, RequestRecord, Step
from llm_serving.scheduler import Scheduler

MAX_WAITING: Final = 10_000
"""Waiting requests that are looked at; the others are counted."""
MAX_SNAPSHOT_WAITING: Final = 1024
"""Waiting requests that are looked at; the others are counted."""
MAX_STEPS: Final = 64
"""Newest steps since the last snapshot."""
MAX_ENDED: Final = 64
"""Finished requests since the last snapshot."""


class RunningRequest(Struct, kw_only=True):
    """A request that holds a slot."""

    id: str
    request_class: str
    tenant: str
    phase: str
    """`prefill`, `decode`, or `paused`: a beam that waits for the others of its search."""
    since_step: int
    seconds: float
    """It has held its slot."""
    tokens: int
    """Of prompt and output."""
    computed: int
    """Of these, in the cache or on their way there."""
    blocks: int
    preemptions: int
    age: float
    """Seconds since it arrived."""
    prompt: int
    """Tokens of its prompt."""
    cached: int
    """Of these, found computed when it first ran."""
    most: int
    """Tokens that it can have at most, of prompt and output."""
    shared: int
    """Blocks at its beginning that others hold as well."""
    group: int | None
    """Requests of the same number begin with the same block; null: it shares none."""

    @classmethod
    def of(cls, request: Request, blocks: BlockManager, now: float) -> RunningRequest:
        """Its group is the first block that it shares, which whoever shows it to others must name otherwise."""
        since_step, since = request.running_since
        num_shared = blocks.num_blocks_shared(request.request_id)
        return cls(
            id=request.request_id,
            request_class=request.request_class.name,
            tenant=request.tenant,
            phase="paused" if request.paused else "decode" if request.is_decoding else "prefill",
            since_step=since_step,
            seconds=now - since,
            tokens=request.num_tokens,
            computed=request.num_computed_tokens,
            blocks=blocks.num_blocks_held(request.request_id),
            preemptions=request.num_preemptions,
            age=now - request.arrival_time,
            prompt=request.num_prompt_tokens,
            cached=request.num_cached_tokens,
            most=request.max_num_tokens,
            shared=num_shared,
            group=next(iter(blocks.table(request.request_id))) if num_shared else None,
        )


class WaitingRequest(Struct, kw_only=True):
    id: str
    request_class: str
    tenant: str
    seconds: float
    """Since it arrived."""
    tokens: int
    preemptions: int
    has_run: bool
    """Whether it had a slot before and lost it."""
    tenant_limit: bool
    """Whether it waits for others of its tenant, which runs as many as it may."""
    prompt: int
    waited: int | None
    """Steps, of those that `bound` counts; null: nothing is promised, or it has been admitted before."""
    bound: int | None
    """Steps that it waits at most to be admitted for the first time."""

    @classmethod
    def of(cls, request: Request, scheduler: Scheduler, now: float, *, is_apart: bool) -> WaitingRequest:
        monitor = scheduler.waiting_requests.monitor
        is_promised = not request.has_run and monitor.is_watching(request)
        return cls(
            id=request.request_id,
            request_class=request.request_class.name,
            tenant=request.tenant,
            seconds=now - request.arrival_time,
            tokens=request.num_tokens,
            preemptions=request.num_preemptions,
            has_run=request.has_run,
            tenant_limit=is_apart,
            prompt=request.num_prompt_tokens,
            waited=monitor.num_steps_waited(request) if is_promised else None,
            bound=request.wait_bound if is_promised else None,
        )


class ClassQueueState(Struct, kw_only=True):
    """A class: its queue, and what it holds."""

    request_class: str
    rank: int
    weight: int
    running: int
    waiting: int
    blocks: int
    oldest_s: float | None
    """Seconds since the one arrived that came first of those that wait; null: nobody does."""
    bounds: str
    """What holds for each of its requests."""

    @classmethod
    def of(
        cls, each: RequestClass, scheduler: Scheduler, waiting: Sequence[WaitingRequest], bounds: str
    ) -> ClassQueueState:
        waits = [request.seconds for request in waiting if request.request_class == each.name]
        return cls(
            request_class=each.name,
            rank=each.rank,
            weight=each.weight,
            running=scheduler.slots_by_class[each.name],
            waiting=len(scheduler.waiting.queues[each.name]),
            blocks=scheduler.slots.blocks_by_class[each.name],
            oldest_s=max(waits, default=None),
            bounds=bounds,
        )


class BlockUsage(Struct, kw_only=True):
    """The key/value cache, and the host pool beside it."""

    tokens: int
    """Of one block."""
    total: int
    used: int
    cached: int
    """Free, and hold prefixes that can be found."""
    free: int
    """Those included."""
    host_total: int
    host_used: int

    @classmethod
    def of(cls, blocks: BlockManager) -> BlockUsage:
        pool, host = blocks.pool, blocks.host_pool
        return cls(
            tokens=blocks.block_size,
            total=pool.num_blocks,
            used=pool.num_used_blocks,
            cached=pool.num_cached_blocks,
            free=pool.num_free_blocks,
            host_total=host.num_blocks,
            host_used=host.num_used_blocks,
        )


class SchedulerState(NamedTuple):
    """Everything is a copy: nothing of it changes any more."""

    now: float
    """Seconds on the engine's clock."""
    step: int
    """The next one."""
    num_slots: int
    running: dict[int, RunningRequest]
    """`Request.sequence` -> its row, in the order in which they decode."""
    waiting: dict[int, WaitingRequest]
    """The same of those that were looked at, in no particular order."""
    num_waiting: int
    """All of them, those included that wait for others of their own request."""
    classes: list[ClassQueueState]
    """By rank."""
    served: dict[str, dict[str, int]]
    """Class -> tenant -> service it has got, as fairness among tenants counts it; of tenants that are known here."""
    blocks: BlockUsage


def scheduler_state(
    scheduler: Scheduler, now: float, step_s: float | None = None, max_waiting: int = MAX_WAITING
) -> SchedulerState:
    """To be called by the thread that owns the scheduler.

    Args:
        scheduler: Is copied from.
        now: Seconds on the engine's clock.
        step_s: Seconds a step takes, if that is known.
        max_waiting: Waiting requests that are looked at.
    """
    running = {each.sequence: RunningRequest.of(each, scheduler.blocks, now) for each in scheduler.running}
    waiting = {
        each.sequence: WaitingRequest.of(each, scheduler, now, is_apart=False)
        for each in islice(scheduler.waiting, max_waiting)
    }
    for each in islice(scheduler.held_by_tenant_limits(), max_waiting - len(waiting)):
        waiting[each.sequence] = WaitingRequest.of(each, scheduler, now, is_apart=True)
    tenants = {each.tenant for each in running.values()} | {each.tenant for each in waiting.values()}
    rows = list(waiting.values())
    return SchedulerState(
        now=now,
        step=scheduler.num_steps,
        num_slots=scheduler.limits.max_num_seqs,
        running=running,
        waiting=waiting,
        num_waiting=scheduler.num_waiting,
        classes=[
            ClassQueueState.of(each, scheduler, rows, bounds.describe(step_s))
            for each, bounds in zip(scheduler.classes, scheduler.bounds, strict=True)
        ],
        served={
            name: {tenant: queue.token_counters.served(tenant) for tenant in tenants}
            for name, queue in scheduler.waiting.queues.items()
        },
        blocks=BlockUsage.of(scheduler.blocks),
    )


class EngineSnapshot(NamedTuple):
    """Nothing of it changes any more, but for a life that is not over."""

    state: SchedulerState
    max_step_tokens: int
    """The budget of a step."""
    step_s: float | None
    """Seconds a step takes, of late."""
    steps: list[tuple[float, Step]]
    """When the WorkAgent began it, and the step."""
    ended: list[RequestRecord]
    cpu_s: float
    """Seconds of processor time that it took."""


def take_snapshot(
    scheduler: Scheduler,
    journal: EventLog,
    now: float,
    step_s: float | None,
    since: float,
    cpu_clock: Clock = time.thread_time,
) -> EngineSnapshot:
    """To be called by the thread that owns the scheduler; `since` is `state.now` of the time before."""
    began = cpu_clock()
    state = scheduler_state(scheduler, now, step_s, MAX_SNAPSHOT_WAITING)
    steps, ended = journal.steps_since(since, MAX_STEPS), journal.ended_since(since, MAX_ENDED)
    return EngineSnapshot(
        state, scheduler.limits.max_num_batched_tokens, step_s, steps, ended, cpu_s=cpu_clock() - began
    )
