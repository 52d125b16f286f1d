"""Reports of an engine to its TTFT predictor: running requests, steps in flight, and step times with the master's
share.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from llm_serving.admission.ttft_predictor import InFlightSteps, TtftPredictor
from llm_serving.observability.step_observer import CompletedStep, StepObserver
from llm_serving.scheduler import Schedule, Scheduler

STEP_MEMORY: Final = 128
"""Steps after which the time of one counts 1/e in their mean."""


class StepTimes:
    """Seconds; each method is told the time on the engine's clock.

    ```
    submitted ... replied ... begun_next ... settled
    ```
    """

    def __init__(self) -> None:
        self.began = 0.0
        """When the WorkAgent could begin with the oldest step in flight."""
        self.step_s = 0.0
        """That the latest step took, from when the WorkAgent could begin with it."""
        self.mean_s: float | None = None
        """The same, of late; None before the first."""
        self.computed_s = 0.0
        """That the latest step took without the forming of it, where none was in flight meanwhile."""
        self.host_s = 0.0
        """Of the master for a step: to take a reply, and to form the next step."""
        self._settle_s = 0.0
        """The former of them."""
        self._replied = 0.0
        """When the newest reply came, or a step was submitted behind which none was in flight."""

    def submitted(self, formed: float, now: float, *, follows: bool) -> None:
        """A step has gone that the master began to form at `formed`; `follows`: one before it is in flight."""
        self.host_s = self._settle_s + now - formed
        if not follows:
            self.began, self._replied = formed, now

    def replied(self, now: float) -> None:
        """The reply to the oldest step has come."""
        self.computed_s, self._replied = now - self._replied, now

    def passed_on(self, now: float) -> None:
        """The scheduler knows what that reply says: the WorkAgent can go on with the next step."""
        self.step_s, self.began = now - self.began, now
        mean_s = self.step_s if self.mean_s is None else self.mean_s
        self.mean_s = mean_s + (self.step_s - mean_s) / STEP_MEMORY

    def settled(self, now: float) -> None:
        """All is done that the reply asks for."""
        self._settle_s = now - self._replied


class LoadReports(StepObserver):
    """Feeds the TTFT predictor on the engine's thread; other threads only read `predictor`.

    Args:
        scheduler: Of the engine.
        times: Of its steps.
    """

    def __init__(self, scheduler: Scheduler, times: StepTimes) -> None:
        self.predictor = TtftPredictor(scheduler.limits)
        self.num_left = 0
        """Tokens of prompts that the newest step begins and does not finish."""
        self._scheduler = scheduler
        self._times = times

    def on_scheduled(self, schedule: Schedule | None, in_flight: Sequence[Schedule], now: float) -> None:
        if schedule is not None:  # later requests cannot join it
            self.num_left = sum([row.request.num_tokens - row.end for row in schedule.rows if not row[3]])
            self._report_in_flight([*in_flight, schedule], self._times.began if in_flight else now)
        self.predictor.record_running(len(self._scheduler.running), self._scheduler.blocked)
        if self._has_room():
            self.predictor.record_free_blocks()

    def on_completed(self, step: CompletedStep) -> None:
        self._report_in_flight(step.in_flight, step.now)  # the oldest of them begins now
        if step.finished:
            self.predictor.record_running(len(self._scheduler.running))
        self.predictor.record_step(
            num_tokens=step.num_tokens,
            num_rows=len(step.schedule.rows),
            seconds=self._times.step_s,
            num_finished=len(step.finished),
        )

    def on_failed(self, now: float) -> None:
        self.num_left = 0
        self._report_in_flight((), self._times.began)

    def _report_in_flight(self, steps: Collection[Schedule], began: float) -> None:
        """Report these steps, the oldest of which began then."""
        num_tokens = sum([each.num_tokens - len(each.rows) for each in steps])
        self.predictor.in_flight = InFlightSteps(len(steps), num_tokens, self.num_left, began)

    def _has_room(self) -> bool:
        """Whether no request waits, and the KV cache has room for one more of the size of the running ones."""
        scheduler = self._scheduler
        pool, num_running = scheduler.blocks.pool, len(scheduler.running)
        num_free = pool.num_free_blocks - num_running  # one of each is kept for those that run
        return not len(scheduler.waiting) and num_free * num_running >= pool.num_used_blocks
