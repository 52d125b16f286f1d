"""Requests that are of no more use after a moment, the next one first."""

from __future__ import annotations

import heapq
import itertools
from typing import Final

from llm_serving.core.request import Request

SMALLEST_SWEEP: Final = 64
"""Entries below which those of ended requests are left where they are."""


_Entry = tuple[float, str, int, Request]
"""The third decides between entries of one id: a request may come back from another replica as another object."""


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
    began = request.arrival_time if request.exchange is None else request.exchange.received_time
    return request.deadline - began
