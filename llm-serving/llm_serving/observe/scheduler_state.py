"""What one scheduler looks like at one moment, copied by the engine's thread so that others may read it."""

from __future__ import annotations

from itertools import islice
from typing import Final, NamedTuple

from llm_serving.core.request import Request
from llm_serving.scheduler import Scheduler

MAX_WAITING: Final = 10_000
"""Waiting requests that are looked at; the others are counted."""


class RunningState(NamedTuple):
    """A request that holds a slot."""

    request_id: str
    request_class: str
    tenant: str
    phase: str
    since_step: int
    since: float
    """Seconds on the engine's clock."""
    num_tokens: int
    """Of prompt and output, as far as they are known."""
    num_computed_tokens: int
    num_blocks: int
    num_preemptions: int
    arrival_time: float
    num_prompt_tokens: int
    num_cached_tokens: int
    """Of the prompt, found computed when it first ran."""
    max_num_tokens: int
    num_shared_blocks: int
    """At the beginning of its table, held by others as well."""
    first_block: int | None
    """Of those, the first; who has the same begins alike. None: it shares none."""
    sequence: int


class WaitingState(NamedTuple):
    request_id: str
    request_class: str
    tenant: str
    arrival_time: float
    num_tokens: int
    num_preemptions: int
    has_run: bool
    is_apart: bool
    """Its tenant runs as many as it may."""
    num_prompt_tokens: int
    num_steps_waited: int | None
    """Of those that `wait_bound` counts; None: nothing is promised, or it has been admitted before."""
    wait_bound: int | None
    sequence: int


class ClassState(NamedTuple):
    name: str
    rank: int
    weight: int
    num_waiting: int
    served: dict[str, int]
    """Tenant -> service it has got, as fairness among tenants counts it; of tenants that are known here."""
    bounds: str


class SchedulerState(NamedTuple):
    """Everything is a copy: nothing of it changes any more."""

    now: float
    step: int
    """The next one."""
    num_slots: int
    running: list[RunningState]
    """In the order in which they decode."""
    waiting: list[WaitingState]
    """Those that were looked at."""
    num_waiting: int
    """All of them, those included that wait for others of their own request."""
    classes: list[ClassState]
    """By rank."""
    block_size: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    """Of those not used, they hold prefixes that can be found."""
    num_host_blocks: int
    num_used_host_blocks: int


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
    pool, host = scheduler.blocks.pool, scheduler.blocks.host_pool
    bounds = {each.name: each.in_words(step_s) for each in scheduler.bounds}
    running = [_running(scheduler, request) for request in scheduler.running]
    waiting = [_waiting(scheduler, request, is_apart=False) for request in islice(scheduler.waiting, max_waiting)]
    apart = islice(scheduler.kept_apart(), max_waiting - len(waiting))
    waiting += [_waiting(scheduler, request, is_apart=True) for request in apart]
    tenants = {each.tenant for each in running} | {each.tenant for each in waiting}
    classes = []
    for each in scheduler.classes:
        queue = scheduler.waiting.queues[each.name]
        served = {tenant: queue.shares.served(tenant) for tenant in tenants}
        classes.append(ClassState(each.name, each.rank, each.weight, len(queue), served, bounds[each.name]))
    return SchedulerState(
        now=now,
        step=scheduler.num_steps,
        num_slots=scheduler.limits.max_num_seqs,
        running=running,
        waiting=waiting,
        num_waiting=scheduler.num_waiting,
        classes=classes,
        block_size=scheduler.blocks.block_size,
        num_blocks=pool.num_blocks,
        num_used_blocks=pool.num_used_blocks,
        num_cached_blocks=pool.num_cached_blocks,
        num_host_blocks=host.num_blocks,
        num_used_host_blocks=host.num_used_blocks,
    )


def _running(scheduler: Scheduler, request: Request) -> RunningState:
    phase = "paused" if request.paused else "decode" if request.is_decoding else "prefill"
    blocks, request_id = scheduler.blocks, request.request_id
    num_shared = blocks.num_blocks_shared(request_id)
    return RunningState(
        request.request_id,
        request.request_class.name,
        request.tenant,
        phase,
        *request.running_since,
        request.num_tokens,
        request.num_computed_tokens,
        blocks.num_blocks_held(request_id),
        request.num_preemptions,
        request.arrival_time,
        request.num_prompt_tokens,
        request.num_cached_tokens,
        request.max_num_tokens,
        num_shared,
        next(iter(blocks.table(request_id))) if num_shared else None,
        request.sequence,
    )


def _waiting(scheduler: Scheduler, request: Request, *, is_apart: bool) -> WaitingState:
    monitor = scheduler.waits.monitor
    is_promised = not request.has_run and monitor.watches(request)
    return WaitingState(
        request.request_id,
        request.request_class.name,
        request.tenant,
        request.arrival_time,
        request.num_tokens,
        request.num_preemptions,
        request.has_run,
        is_apart,
        request.num_prompt_tokens,
        monitor.num_waited(request) if is_promised else None,
        request.wait_bound if is_promised else None,
        request.sequence,
    )
