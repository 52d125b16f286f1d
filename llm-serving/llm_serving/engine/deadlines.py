"""Deadlines of requests, the earliest first, and ending the requests that pass or cannot meet theirs."""

from __future__ import annotations

import heapq
import itertools
from typing import Final

from llm_serving.admission.ttft_predictor import QueueAhead, TtftPredictor
from llm_serving.core.request import FinishReason, Request
from llm_serving.engine.delivery import end
from llm_serving.scheduler import Scheduler

SMALLEST_SWEEP: Final = 64
"""Entries below which those of ended requests are left where they are."""


_Entry = tuple[float, str, int, Request]
"""The third decides between entries of one id: a request may come back from another replica as another object."""

LOOK_EVERY_S: Final = 0.1
"""Interval of the search for waiting requests that cannot meet their deadlines."""
MAX_LOOKED_AT: Final = 16
"""At a time; those with the earliest deadlines."""


class Deadlines:
    """Knows when the next one passes.

    What no longer counts, as its request has ended or its deadline was put off, is forgotten sooner or later.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._numbers = itertools.count()
        self._sweep_at = SMALLEST_SWEEP

    def add(self, request: Request) -> None:
        """Of a request that has been added before the deadline counts that it has now; without one it is left out."""
        if request.deadline is None:
            return
        heapq.heappush(self._heap, (request.deadline, request.request_id, next(self._numbers), request))
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if _counts(entry)]
            heapq.heapify(self._heap)
            self._sweep_at = max(SMALLEST_SWEEP, 2 * len(self._heap))

    @property
    def next(self) -> float | None:
        """The earliest deadline of a request that has not ended."""
        while self._heap and not _counts(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_passed(self, now: float) -> list[Request]:
        """Those whose deadline is not after `now`, once each."""
        passed = []
        while (deadline := self.next) is not None and deadline <= now:
            passed.append(heapq.heappop(self._heap)[3])
        return passed

    def not_begun(self, count: int) -> list[Request]:
        """So many of those that no step has computed, the earliest deadlines first."""
        entries = (each for each in self._heap if each[3].first_scheduled_time is None and _counts(each))
        return [request for *_, request in heapq.nsmallest(count, entries)]


def _counts(entry: _Entry) -> bool:
    deadline, _, _, request = entry
    return not request.is_finished and request.deadline == deadline


def timeout_of(request: Request) -> float:
    """Seconds that the client gave the request, from when its headers had come."""
    assert request.deadline is not None
    began = request.arrival_time if request.http_timings is None else request.http_timings.received_time
    return request.deadline - began


class DeadlineEnforcer:
    """Looks at the requests of one scheduler; times are on the clock of the engine.

    Args:
        deadlines: Of all requests that have one.
        scheduler: That computes them.
    """

    def __init__(self, deadlines: Deadlines, scheduler: Scheduler) -> None:
        self._deadlines = deadlines
        self._scheduler = scheduler
        self._look_again = 0.0
        """When deadlines that cannot be met are looked for again."""

    def is_due(self, now: float) -> bool:
        """Whether `end` may end somebody."""
        deadline = self._deadlines.next
        return deadline is not None and (now >= deadline or now >= self._look_again)

    def end(self, now: float, predictor: TtftPredictor, step_began: float) -> None:
        """Ends whoever is too late, wherever it is.

        Args:
            now: The time.
            predictor: Predicts when a first token is to be expected.
            step_began: When the oldest step in flight did.
        """
        for request in self._deadlines.take_passed(now):
            end(request, FinishReason.TIMEOUT, f"the request was not done within its {timeout_of(request):g} s")
        if now >= self._look_again:
            self._look_again = now + LOOK_EVERY_S
            self._end_hopeless(now, predictor, now - step_began)

    def _end_hopeless(self, now: float, predictor: TtftPredictor, elapsed_s: float) -> None:
        """Ends requests that could not have a first token before their deadline even if they were next.

        Where nothing runs they begin at once, and show whether what was measured still holds.
        """
        speed, scheduler = predictor.speed, self._scheduler
        if speed is None or not scheduler.running:
            return
        num_running = len(scheduler.running)
        for request in self._deadlines.not_begun(MAX_LOOKED_AT):
            first = _first_computed(request)
            if first is None or request.deadline is None:
                continue
            rank = first.request_class.rank
            num_before = sum(scheduler.slots_by_class[each.name] for each in scheduler.classes if each.rank <= rank)
            queue = QueueAhead(
                1,
                scheduler.prefill.estimate_tokens(first),
                num_before,
                num_running,
                in_flight=predictor.in_flight,
                elapsed_s=elapsed_s,
            )
            seconds = speed.seconds_to_first_token(queue)
            if seconds is not None and now + seconds > request.deadline:
                timeout = f"the request cannot be done within its {timeout_of(request):g} s"
                end(request, FinishReason.TIMEOUT, f"{timeout}: its first token is expected in {seconds:.2f} s")


def _first_computed(request: Request) -> Request | None:
    """What waits first of all that is computed for a request; None: something of it has been computed."""
    if request.sink is None:
        return None
    computed = request.sink.active_requests
    return computed[0] if all(each.first_scheduled_time is None for each in computed) and computed else None
