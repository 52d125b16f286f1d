"""Watches, while the server runs, that nobody waits longer than was promised."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from llm_serving.core.request import Request
from llm_serving.scheduler.bounds import ClassBounds

MIN_HEAP: Final = 64
"""Entries of a heap that are not worth tidying up."""


class _Due(NamedTuple):
    """A wait that breaks its bound; told from others of the same request by identity."""

    clock: int
    """Of its class, when that happens."""
    sequence: int
    since: int
    """What the clock of its class showed when it began to wait."""


class WaitMonitor:
    """Counts the requests that wait longer to be admitted than they were promised.

    It has a clock for each class, which counts the steps the class could take part in. No step counts in which a beam
    of a search is under way: beams wait for each other, and how long that takes no limit says.
    """

    def __init__(self, bounds: Sequence[ClassBounds]) -> None:
        self._bounds = {each.name: each for each in bounds}
        self._clocks = dict.fromkeys(self._bounds, 0)
        self._due: dict[str, list[_Due]] = {each.name: [] for each in bounds}
        """Heaps; of those that wait no longer some linger."""
        self._waits: dict[int, _Due] = {}
        """The newest of each that waits, by its sequence."""

    def expect(self, request: Request, num_ahead: int, num_returning: int = 0, num_waited: int = 0) -> None:
        """The request waits from now on, behind so many of its class, and has waited so many steps in another."""
        name = request.request_class.name
        clock, bound = self._clocks[name], self._bounds[name].max_wait_steps(num_ahead, num_returning)
        if not request.has_run:
            request.wait_bound = num_waited + bound
        wait = self._waits[request.sequence] = _Due(clock + bound + 1, request.sequence, clock - num_waited)
        due = self._due[name]
        if len(due) > 2 * len(self._waits) + MIN_HEAP:
            due[:] = [each for each in due if self._counts(each)]
            heapq.heapify(due)
        heapq.heappush(due, wait)

    def admitted(self, request: Request) -> None:
        """The request waits no longer."""
        wait = self._waits.pop(request.sequence)
        if not request.has_run:
            request.num_steps_waited = self._clocks[request.request_class.name] - wait.since

    def watches(self, request: Request) -> bool:
        """Whether it waits and was promised something."""
        return request.sequence in self._waits

    def num_waited(self, request: Request) -> int:
        """Steps that have been counted since it began to wait."""
        return self._clocks[request.request_class.name] - self._waits[request.sequence].since

    def forget(self, request: Request) -> None:
        """The request has ended, wherever it was."""
        self._waits.pop(request.sequence, None)

    def tick(self, closed: Collection[str]) -> int:
        """A step has been formed, and classes in `closed` took no part; returns how many bounds it broke."""
        violations = 0
        for name, due in self._due.items():
            if name not in closed:
                self._clocks[name] += 1
            while due and (due[0].clock <= self._clocks[name] or not self._counts(due[0])):
                violations += self._counts(heapq.heappop(due))
        return violations

    def _counts(self, due: _Due) -> bool:
        """Whether it has waited all the time."""
        return self._waits.get(due.sequence) is due
