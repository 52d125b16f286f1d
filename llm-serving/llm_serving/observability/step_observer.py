"""Observers of an engine's steps. The engine's thread calls them. Observers must not change the engine's state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from llm_serving.core.request import Request
from llm_serving.scheduler import Schedule
from llm_serving.scheduler.schedule import Blocked

NO_DRAFTS: Final[Mapping[int, int]] = MappingProxyType({})


class CompletedStep(NamedTuple):
    """A step whose results the scheduler has applied and whose output was published."""

    schedule: Schedule
    num_tokens: int
    finished: list[Request]
    accepted: Mapping[int, int]
    """`Request.sequence` -> number of accepted draft tokens, for rows with drafts."""
    in_flight: Sequence[Schedule]
    now: float
    """When the scheduler had applied the results. The WorkAgent could begin the next step then."""


class StepObserver:
    """Base class of observers. Times are seconds on the engine's clock. An engine calls only the methods that a
    subclass overrides, for each step in this order: `on_scheduled`, `on_submitted`, then `on_completed` or `on_failed`.
    """

    def on_scheduled(
        self, schedule: Schedule | None, in_flight: Sequence[Schedule], blocked: Blocked | None, now: float
    ) -> None:
        """Called with the next step, or None if none can run. `blocked` is the first request that did not fit."""

    def on_submitted(self, schedule: Schedule, now: float) -> None:
        """Called after a step was submitted to the executor. `now`: time at which the step's scheduling began."""

    def on_completed(self, step: CompletedStep) -> None: ...

    def on_failed(self, now: float) -> None:
        """Called when a step failed or the WorkAgent exited. No step is in flight then."""


def observers_by_event(observers: Collection[StepObserver]) -> dict[str, list[StepObserver]]:
    """Return, for the name of each method of `StepObserver`, the observers that override the method."""
    events = [name for name in vars(StepObserver) if name.startswith("on_")]
    return {
        event: [each for each in observers if getattr(type(each), event) is not getattr(StepObserver, event)]
        for event in events
    }
