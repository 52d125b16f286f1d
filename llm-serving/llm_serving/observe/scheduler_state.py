"""What one scheduler looks like at one moment, copied by the engine's thread so that others may read it."""

from __future__ import annotations

from itertools import islice
from typing import Final, NamedTuple

from llm_serving.observe.scheduler_rows import Blocks, ClassQueue, RunningRequest, WaitingRequest
from llm_serving.scheduler import Scheduler

MAX_WAITING: Final = 10_000
"""Waiting requests that are looked at; the others are counted."""


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
    classes: list[ClassQueue]
    """By rank."""
    served: dict[str, dict[str, int]]
    """Class -> tenant -> service it has got, as fairness among tenants counts it; of tenants that are known here."""
    blocks: Blocks


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
    for each in islice(scheduler.kept_apart(), max_waiting - len(waiting)):
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
            ClassQueue.of(each, scheduler, rows, bounds.in_words(step_s))
            for each, bounds in zip(scheduler.classes, scheduler.bounds, strict=True)
        ],
        served={
            name: {tenant: queue.shares.served(tenant) for tenant in tenants}
            for name, queue in scheduler.waiting.queues.items()
        },
        blocks=Blocks.of(scheduler.blocks),
    )
