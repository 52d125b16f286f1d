"""What an engine reports to its TTFT predictor: running requests, steps in flight, and the times of steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from llm_serving.admission.ttft_predictor import InFlightSteps, TtftPredictor
from llm_serving.observability.step_observer import CompletedStep, StepObserver
from llm_serving.scheduler import Schedule, Scheduler
from llm_serving.scheduler.schedule import Blocked

STEP_MEMORY: Final = 128
"""Steps after which the time of one counts 1/e in their mean."""


class StepTimes:
    """Durations of steps and of the master's work for them, in seconds.

    The methods are called in this order for each step, with the time on the engine's clock:

        record_submitted ... record_reply ... record_updated (the next step begins) ... record_published
    """

    def __init__(self) -> None:
        self.began = 0.0
        """When the WorkAgent could begin the oldest step in flight."""
        self.step_s = 0.0
        """Duration of the newest step, since the WorkAgent could begin it."""
        self.mean_s: float | None = None
        """Moving average of `step_s`; None before the first step."""
        self.computed_s = 0.0
        """Duration of the newest step without scheduling, if no other step was in flight."""
        self.host_s = 0.0
        """The master's time per step: to process a reply and to schedule the next step."""
        self._reply_s = 0.0
        """Time to process a reply."""
        self._replied = 0.0
        """When the newest reply came, or a step was submitted while none was in flight."""

    def record_submitted(self, scheduled: float, now: float, *, follows: bool) -> None:
        """Record a submitted step whose scheduling began at `scheduled`; `follows`: another step is in flight."""
        self.host_s = self._reply_s + now - scheduled
        if not follows:
            self.began, self._replied = scheduled, now

    def record_reply(self, now: float) -> None:
        """Record the reply to the oldest step."""
        self.computed_s, self._replied = now - self._replied, now

    def record_updated(self, now: float) -> None:
        """Record that the scheduler has applied the reply, so the WorkAgent can begin the next step."""
        self.step_s, self.began = now - self.began, now
        mean_s = self.step_s if self.mean_s is None else self.mean_s
        self.mean_s = mean_s + (self.step_s - mean_s) / STEP_MEMORY

    def record_published(self, now: float) -> None:
        """Record that the reply is processed."""
        self._reply_s = now - self._replied


class LoadReports(StepObserver):
    """Feeds the TTFT predictor in the engine's thread; other threads only read `predictor`."""

    def __init__(self, scheduler: Scheduler, times: StepTimes) -> None:
        self.predictor = TtftPredictor(scheduler.limits)
        self.num_tokens_left = 0
        """Tokens of prompts that the newest step begins and does not finish."""
        self._scheduler = scheduler
        self._times = times

    def on_scheduled(
        self, schedule: Schedule | None, in_flight: Sequence[Schedule], blocked: Blocked | None, now: float
    ) -> None:
        if schedule is not None:  # later requests cannot join it
            self.num_tokens_left = 0
            for row in schedule.rows:
                if not row.num_samples:
                    self.num_tokens_left += row.request.num_tokens - row.end
            self._report_in_flight([*in_flight, schedule], self._times.began if in_flight else now)
        # Room for another request: none waits, and one of mean size fits beside a block for each running request.
        pool, num_running = self._scheduler.blocks.pool, len(self._scheduler.running)
        num_free = pool.num_free_blocks - num_running
        has_room = not len(self._scheduler.waiting) and num_free * num_running >= pool.num_used_blocks
        self.predictor.record_running(num_running, blocked, has_room)

    def on_completed(self, step: CompletedStep) -> None:
        self._report_in_flight(step.in_flight, step.now)
        if step.finished:
            self.predictor.record_running(len(self._scheduler.running))
        self.predictor.record_step(
            num_tokens=step.num_tokens,
            num_rows=len(step.schedule.rows),
            seconds=self._times.step_s,
            num_finished=len(step.finished),
        )

    def on_failed(self, now: float) -> None:
        self.num_tokens_left = 0
        self._report_in_flight((), self._times.began)

    def _report_in_flight(self, steps: Collection[Schedule], began: float) -> None:
        """Report the steps in flight, the oldest of which began at `began`."""
        num_tokens = 0
        for each in steps:
            num_tokens += each.num_tokens - len(each.rows)
        self.predictor.in_flight = InFlightSteps(len(steps), num_tokens, self.num_tokens_left, began)
