"""Deadlines of requests: ends the requests that exceed their deadline or cannot meet it."""

from __future__ import annotations

import heapq
import itertools
from typing import Final

from llm_serving.admission.ttft_predictor import QueueAhead, TtftPredictor
from llm_serving.core.request import FinishReason, Request
from llm_serving.engine.sinks import finish
from llm_serving.scheduler import Scheduler

MIN_CLEANUP_SIZE: Final = 64
"""Outdated entries are removed only from a heap with more than this many entries."""
CHECK_INTERVAL_S: Final = 0.1
"""Seconds between two searches for waiting requests that cannot meet their deadline."""
MAX_CHECKED: Final = 16
"""Maximum number of requests that each of these searches checks: those with the earliest deadlines."""

_Entry = tuple[float, str, int, Request]
"""(deadline, request id, number of the entry, request). Ids alone are not unique after a migration."""


class Deadlines:
    """Heap of the deadlines of one engine's requests. It skips the entries of ended requests and replaced deadlines."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.heap: list[_Entry] = []
        self._scheduler = scheduler
        self._numbers = itertools.count()
        self._cleanup_size = MIN_CLEANUP_SIZE
        self._next_check = 0.0

    def add(self, request: Request) -> None:
        assert request.deadline is not None
        heapq.heappush(self.heap, (request.deadline, request.request_id, next(self._numbers), request))
        if len(self.heap) > self._cleanup_size:
            self.heap = [entry for entry in self.heap if _is_current(entry)]
            heapq.heapify(self.heap)
            self._cleanup_size = max(MIN_CLEANUP_SIZE, 2 * len(self.heap))

    @property
    def next(self) -> float | None:
        while self.heap and not _is_current(self.heap[0]):
            heapq.heappop(self.heap)
        return self.heap[0][0] if self.heap else None

    def pop_expired(self, now: float) -> list[Request]:
        expired = []
        while (deadline := self.next) is not None and deadline <= now:
            expired.append(heapq.heappop(self.heap)[3])
        return expired

    def unscheduled(self, count: int) -> list[Request]:
        entries = (each for each in self.heap if each[3].first_scheduled_time is None and _is_current(each))
        return [request for *_, request in heapq.nsmallest(count, entries)]

    def is_due(self, now: float) -> bool:
        deadline = self.next
        return deadline is not None and (now >= deadline or now >= self._next_check)

    def end_expired(self, now: float, predictor: TtftPredictor, step_began: float) -> None:
        """End requests that exceed or cannot meet their deadline. `step_began`: start of the oldest step in flight."""
        for request in self.pop_expired(now):
            error = f"the request did not finish within its time limit of {timeout_of(request):g} s"
            finish(request, FinishReason.TIMEOUT, error)
        if now >= self._next_check:
            self._next_check = now + CHECK_INTERVAL_S
            self._end_hopeless(now, predictor, now - step_began)

    def _end_hopeless(self, now: float, predictor: TtftPredictor, elapsed_s: float) -> None:
        """End the waiting requests that would miss their deadline even if they were next in their class."""
        speed, scheduler = predictor.speed, self._scheduler
        if speed is None or not scheduler.running:
            return  # without a running request, the next one starts at once, and its step updates the predictor
        num_running = len(scheduler.running)
        for request in self.unscheduled(MAX_CHECKED):
            first = _first_to_compute(request)
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
                error = f"the request cannot finish within its time limit of {timeout_of(request):g} s"
                finish(request, FinishReason.TIMEOUT, f"{error}: its first token is expected in {seconds:.2f} s")


def timeout_of(request: Request) -> float:
    """Return the seconds from the arrival of the request's HTTP headers to its deadline."""
    assert request.deadline is not None
    began = request.arrival_time if request.http_timings is None else request.http_timings.received_time
    return request.deadline - began


def _is_current(entry: _Entry) -> bool:
    deadline, _, _, request = entry
    return not request.is_finished and request.deadline == deadline


def _first_to_compute(request: Request) -> Request | None:
    if request.sink is None:
        return None
    computed = request.sink.active_requests
    return computed[0] if all(each.first_scheduled_time is None for each in computed) and computed else None
