"""What the door is told of an engine: who has a place, which steps are under way, how long steps take.

How long the steps of an engine take, and what of that is the master's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from llm_serving.admission.answer_lengths import AnswerLengths, asked_of
from llm_serving.admission.load_estimator import LoadEstimator, UnderWay
from llm_serving.admission.slots import Slots
from llm_serving.core.request import Request
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


class LoadReports:
    """Belongs to the engine's thread; what is read of it elsewhere is its `load`.

    Args:
        scheduler: Of the engine.
        times: Of its steps.
    """

    def __init__(self, scheduler: Scheduler, times: StepTimes) -> None:
        self.load = LoadEstimator(scheduler.limits)
        self.lengths = AnswerLengths()
        self.num_left = 0
        """Tokens of prompts that the newest step begins and does not compute."""
        self._scheduler = scheduler
        self._times = times

    def formed(self, schedule: Schedule | None, in_flight: Collection[Schedule], now: float) -> None:
        """The next step was decided, behind those in flight; None: nobody can move."""
        if schedule is not None:  # whoever comes from here on is not in it
            self.num_left = sum([row.request.num_tokens - row.end for row in schedule.rows if not row[3]])
            self._tell_under_way([*in_flight, schedule], self._times.began if in_flight else now)
        self.load.placed(self._slots(), self._scheduler.blocked)
        if self._has_room():
            self.load.has_room()

    def went_on(self, in_flight: Collection[Schedule], now: float) -> None:
        """The scheduler knows the reply to a step: those in flight are under way, the oldest from now on."""
        self._tell_under_way(in_flight, now)

    def replied(self, schedule: Schedule, num_tokens: int, num_ended: int) -> None:
        """All have been told of the reply to a step of so many tokens, by which so many requests ended."""
        if num_ended:
            self.load.placed(self._slots())
        self.load.step(
            num_tokens=num_tokens,
            num_rows=len(schedule.rows),
            seconds=self._times.step_s,
            num_ended=num_ended,
        )

    def lost(self) -> None:
        """No step is under way any more."""
        self.num_left = 0
        self._tell_under_way((), self._times.began)

    def note_length(self, request: Request) -> None:
        """A sequence has come to its end."""
        self.lengths.ended(len(request.output_token_ids), asked_of(request), request.sequence)

    def _slots(self) -> Slots:
        return Slots(tuple(self._scheduler.running), self.lengths)

    def _tell_under_way(self, steps: Collection[Schedule], began: float) -> None:
        """Nobody can join these steps any more, of which the oldest began then."""
        num_tokens = tuple([each.num_tokens - len(each.rows) for each in steps])
        self.load.under_way = UnderWay(num_tokens, self.num_left, began)

    def _has_room(self) -> bool:
        """Whether nobody waits, and the cache has room for one more like those that run."""
        scheduler = self._scheduler
        pool, num_running = scheduler.blocks.pool, len(scheduler.running)
        num_free = pool.num_free_blocks - num_running  # one of each is kept for those that run
        return not len(scheduler.waiting) and num_free * num_running >= pool.num_used_blocks
