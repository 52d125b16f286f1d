"""Snapshots of a scheduler and its engine, which the engine's thread makes for other threads."""

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
MAX_SNAPSHOT_WAITING: Final = 1024
MAX_STEPS: Final = 64
MAX_ENDED: Final = 64


class RunningRequest(Struct, kw_only=True):
    id: str
    request_class: str
    tenant: str
    phase: str
    """`prefill`, `decode`, or `paused`: a beam that waits for the other beams of its search."""
    since_step: int
    seconds: float
    tokens: int
    computed: int
    """Number of tokens whose keys and values are computed or being computed."""
    blocks: int
    preemptions: int
    age: float
    prompt: int
    cached: int
    """Number of prompt tokens found in the prefix cache at the first admission."""
    most: int
    """Maximum number of tokens of prompt and output."""
    shared: int
    """Number of blocks from the start that other requests share."""
    group: int | None
    """The same number for all requests that share their first block; null if the request shares no block."""

    @classmethod
    def of(cls, request: Request, blocks: BlockManager, now: float) -> RunningRequest:
        """Describe a running request. `group`, the id of its first block if that is shared, must not reach clients."""
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
    tokens: int
    preemptions: int
    has_run: bool
    tenant_limit: bool
    prompt: int
    waited: int | None
    """Number of steps waited, counted like `bound`; null if no bound applies or the request was admitted before."""
    bound: int | None
    """Guaranteed maximum number of steps until the first admission."""

    @classmethod
    def of(cls, request: Request, scheduler: Scheduler, now: float, *, is_at_tenant_limit: bool) -> WaitingRequest:
        monitor = scheduler.waiting_requests.monitor
        has_bound = not request.has_run and monitor.is_watching(request)
        return cls(
            id=request.request_id,
            request_class=request.request_class.name,
            tenant=request.tenant,
            seconds=now - request.arrival_time,
            tokens=request.num_tokens,
            preemptions=request.num_preemptions,
            has_run=request.has_run,
            tenant_limit=is_at_tenant_limit,
            prompt=request.num_prompt_tokens,
            waited=monitor.num_steps_waited(request) if has_bound else None,
            bound=request.wait_bound if has_bound else None,
        )


class ClassQueueState(Struct, kw_only=True):
    request_class: str
    rank: int
    weight: int
    running: int
    waiting: int
    blocks: int
    oldest_s: float | None
    """Seconds that the oldest request of the class has waited; null if none waits."""
    bounds: str
    """The guaranteed maximum waits of the class's requests, in words."""

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
    tokens: int
    total: int
    used: int
    cached: int
    free: int
    """Free blocks, including cached ones."""
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
    now: float
    step: int
    num_slots: int
    running: dict[int, RunningRequest]
    """`Request.sequence` -> running request, in decode order."""
    waiting: dict[int, WaitingRequest]
    """`Request.sequence` -> waiting request, unordered, up to a maximum number."""
    num_waiting: int
    classes: list[ClassQueueState]
    served: dict[str, dict[str, int]]
    """Class -> tenant -> virtual tokens, for the tenants of `running` and `waiting`."""
    blocks: BlockUsage


def scheduler_state(
    scheduler: Scheduler, now: float, step_s: float | None = None, max_waiting: int = MAX_WAITING
) -> SchedulerState:
    """Return a scheduler's state at `now`. `step_s`: measured duration of a step. Only for the engine's thread."""
    running = {each.sequence: RunningRequest.of(each, scheduler.blocks, now) for each in scheduler.running}
    waiting = {
        each.sequence: WaitingRequest.of(each, scheduler, now, is_at_tenant_limit=False)
        for each in islice(scheduler.waiting, max_waiting)
    }
    for each in islice(scheduler.held_by_tenant_limits(), max_waiting - len(waiting)):
        waiting[each.sequence] = WaitingRequest.of(each, scheduler, now, is_at_tenant_limit=True)
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
    """A scheduler's state and recent events. It is immutable, except for the records of unfinished requests."""

    state: SchedulerState
    max_step_tokens: int
    step_s: float | None
    steps: list[tuple[float, Step]]
    """(time at which the WorkAgent began the step, step)."""
    ended: list[RequestRecord]
    cpu_s: float


def take_snapshot(
    scheduler: Scheduler,
    event_log: EventLog,
    now: float,
    step_s: float | None,
    since: float,
    cpu_clock: Clock = time.thread_time,
) -> EngineSnapshot:
    """Return a snapshot with the events after `since`, the previous snapshot's time. Only for the engine's thread."""
    began = cpu_clock()
    state = scheduler_state(scheduler, now, step_s, MAX_SNAPSHOT_WAITING)
    steps, ended = event_log.steps_since(since, MAX_STEPS), event_log.ended_since(since, MAX_ENDED)
    return EngineSnapshot(
        state, scheduler.limits.max_num_batched_tokens, step_s, steps, ended, cpu_s=cpu_clock() - began
    )
