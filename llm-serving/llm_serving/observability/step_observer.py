"""What watches the steps of an engine without changing them: the events of one step, in the engine's thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llm_serving.core.request import Request
from llm_serving.scheduler import Schedule


class CompletedStep(NamedTuple):
    """A step whose results the scheduler has applied and whose output is on its way to the clients."""

    schedule: Schedule
    num_tokens: int
    """Tokens that it computed, draft tokens included."""
    finished: list[Request]
    """Requests that ended with it."""
    accepted: Mapping[int, int]
    """`Request.sequence` -> accepted draft tokens, of the rows that had drafts."""
    in_flight: Sequence[Schedule]
    """Steps submitted after it, the oldest first."""
    now: float
    """When the scheduler had applied the results: the WorkAgent could begin with the next step."""


class StepObserver:
    """Base class of observers; each event does nothing. Times are seconds on the engine's clock.

    Events of one step come in this order: `on_scheduled`, `on_submitted`, then `on_completed` or `on_failed`.
    """

    def on_scheduled(self, schedule: Schedule | None, in_flight: Sequence[Schedule], now: float) -> None:
        """The scheduler has decided the step after those in flight; None: no request can move."""

    def on_submitted(self, schedule: Schedule, now: float) -> None:
        """The executor has got the step, which was decided at `now`."""

    def on_completed(self, step: CompletedStep) -> None:
        """The results of the oldest step in flight have been applied."""

    def on_failed(self, now: float) -> None:
        """A step failed or the WorkAgent died: no step is in flight any more."""
