"""Observers of an engine's steps, which the engine's thread calls, and which must change nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

from llm_serving.core.request import Request
from llm_serving.scheduler import Schedule
from llm_serving.scheduler.schedule import Blocked

NO_DRAFTS: Final[Mapping[int, int]] = MappingProxyType({})


class CompletedStep(NamedTuple):
    """A step whose results the scheduler has applied, and whose output is on its way to the clients."""

    schedule: Schedule
    num_tokens: int
    """Number of tokens computed, draft tokens included."""
    finished: list[Request]
    accepted: Mapping[int, int]
    """`Request.sequence` -> number of accepted draft tokens, for rows with drafts."""
    in_flight: Sequence[Schedule]
    """Steps submitted after this one, the oldest first."""
    now: float
    """Time at which the scheduler had applied the results, so that the WorkAgent could begin the next step."""


class StepObserver:
    """Base class of observers. An engine calls only the events that a subclass overrides, for each step in this order:
    `on_scheduled`, `on_submitted`, then `on_completed` or `on_failed`. Times are seconds on the engine's clock.
    """

    def on_scheduled(
        self, schedule: Schedule | None, in_flight: Sequence[Schedule], blocked: Blocked | None, now: float
    ) -> None:
        """The scheduler formed the next step; None: no request can run. `blocked`: the first one left waiting."""

    def on_submitted(self, schedule: Schedule, now: float) -> None:
        """The executor has received a step, which was formed at `now`."""

    def on_completed(self, step: CompletedStep) -> None:
        """The results of the oldest step in flight have been applied."""

    def on_failed(self, now: float) -> None:
        """A step failed or the WorkAgent exited, so no step is in flight."""


def observers_by_event(observers: Collection[StepObserver]) -> dict[str, list[StepObserver]]:
    """Return event name -> observers that override its method."""
    events = [name for name in vars(StepObserver) if name.startswith("on_")]
    return {
        event: [each for each in observers if getattr(type(each), event) is not getattr(StepObserver, event)]
        for event in events
    }
