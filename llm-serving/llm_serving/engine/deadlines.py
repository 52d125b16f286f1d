"""Requests that are of no more use after a moment, the next one first."""

from __future__ import annotations

import heapq
from typing import Final

from llm_serving.core.request import Request

SMALLEST_SWEEP: Final = 64
"""Entries below which those of ended requests are left where they are."""


class Deadlines:
    """Knows when the next one passes; a request that has ended is forgotten sooner or later, and never returned."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str, Request]] = []
        self._sweep_at = SMALLEST_SWEEP

    def add(self, request: Request) -> None:
        """A request without a deadline is left out."""
        if request.deadline is None:
            return
        heapq.heappush(self._heap, (request.deadline, request.request_id, request))
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapq.heapify(self._heap)
            self._sweep_at = max(SMALLEST_SWEEP, 2 * len(self._heap))

    @property
    def next(self) -> float | None:
        """The earliest deadline of a request that has not ended."""
        while self._heap and self._heap[0][2].is_finished:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_passed(self, now: float) -> list[Request]:
        """Those whose deadline is not after `now`, once each."""
        passed = []
        while (deadline := self.next) is not None and deadline <= now:
            passed.append(heapq.heappop(self._heap)[2])
        return passed

    def not_begun(self, count: int) -> list[Request]:
        """So many of those that no step has computed, the earliest deadlines first."""
        entries = (each for each in self._heap if each[2].first_scheduled_time is None and not each[2].is_finished)
        return [request for _, _, request in heapq.nsmallest(count, entries)]


def timeout_of(request: Request) -> float:
    """Seconds that the client gave the request, from when its headers had come."""
    assert request.deadline is not None
    began = request.arrival_time if request.exchange is None else request.exchange.received_time
    return request.deadline - began
