"""What one engine looks like, and what has happened there since somebody looked last: for those who watch it."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from llm_serving.core.clock import Clock
from llm_serving.observe.journal import Journal, Life, Step
from llm_serving.observe.scheduler_state import SchedulerState, scheduler_state
from llm_serving.scheduler import Scheduler

MAX_WAITING: Final = 1024
"""Waiting requests that are looked at; the others are counted."""
MAX_STEPS: Final = 64
"""The newest of those since the last time."""
MAX_ENDED: Final = 64
"""The same of requests that ended."""


class Glance(NamedTuple):
    """Nothing of it changes any more, but for a life that is not over."""

    state: SchedulerState
    max_step_tokens: int
    """The budget of a step."""
    step_s: float | None
    """Seconds a step takes, of late."""
    steps: list[tuple[float, Step]]
    """When the WorkAgent began it, and the step."""
    ended: list[Life]
    cpu_s: float
    """Seconds of processor time that it took."""


def glance(
    scheduler: Scheduler,
    journal: Journal,
    now: float,
    step_s: float | None,
    since: float,
    cpu_clock: Clock = time.thread_time,
) -> Glance:
    """To be called by the thread that owns the scheduler; `since` is `state.now` of the time before."""
    began = cpu_clock()
    state = scheduler_state(scheduler, now, step_s, MAX_WAITING)
    steps, ended = journal.steps_since(since, MAX_STEPS), journal.ended_since(since, MAX_ENDED)
    return Glance(state, scheduler.limits.max_num_batched_tokens, step_s, steps, ended, cpu_s=cpu_clock() - began)
