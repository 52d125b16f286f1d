"""What the door is told of an engine: who has a place, which steps are under way, how long steps take."""

from __future__ import annotations

from collections.abc import Collection

from llm_serving.admission.answer_lengths import AnswerLengths, asked_of
from llm_serving.admission.load_estimator import LoadEstimator, UnderWay
from llm_serving.admission.slots import Slots
from llm_serving.core.request import Request
from llm_serving.engine.step_times import StepTimes
from llm_serving.scheduler import Schedule, Scheduler


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
