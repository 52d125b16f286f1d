"""Observers of an engine's steps, which are called in the engine's thread and must change nothing."""

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
    """Tokens computed, draft tokens included."""
    finished: list[Request]
    accepted: Mapping[int, int]
    """`Request.sequence` -> number of accepted draft tokens, for rows with drafts."""
    in_flight: Sequence[Schedule]
    """Steps submitted after this one, the oldest first."""
    now: float
    """Time at which the scheduler had applied the results, so that the WorkAgent could begin the next step."""


class StepObserver:
    """Base class of observers. An engine calls only the events that a subclass overrides.

    Times are seconds on the engine's clock. The events of one step come in this order: `on_scheduled`, `on_submitted`,
    then `on_completed` or `on_failed`.
    """

    def on_scheduled(
        self, schedule: Schedule | None, in_flight: Sequence[Schedule], blocked: Blocked | None, now: float
    ) -> None:
        """The scheduler has decided the next step after those in flight; None: no request can run.

        `blocked` is the first request left waiting, with the reason.
        """

    def on_submitted(self, schedule: Schedule, now: float) -> None:
        """The executor has received a step, which was decided at `now`."""

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
