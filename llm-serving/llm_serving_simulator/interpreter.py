"""The threads of one master take turns at its interpreter: whoever has something to do does it in the free time."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, repeat


class Interpreter:
    """Which times are taken, as disjoint spans in order.

    Threads ask in the order in which the simulation lets them go on, not in that of their times, so that a later time
    may be taken before an earlier one. What is asked for fills the free time from its moment on, in as many pieces as
    it takes: an interpreter changes threads every few milliseconds.
    """

    def __init__(self) -> None:
        self.taken_s = 0.0
        """In all."""
        self._begins: list[float] = []
        self._ends: list[float] = []

    def take(self, time: float, seconds: float) -> float:
        """Takes so many seconds from a time on; returns when they are over."""
        if seconds <= 0:
            return time
        self.taken_s += seconds
        first = last = bisect_right(self._ends, time)
        begin, end, left = time, time, seconds
        while last < len(self._begins):
            free = max(0.0, self._begins[last] - end)
            if left <= free:
                break
            left -= free
            end = self._ends[last]
            last += 1
        if last > first:
            begin = min(begin, self._begins[first])
        end += left
        self._begins[first:last] = [begin]
        self._ends[first:last] = [end]
        return end

    def take_each(self, time: float, seconds: float, count: int) -> list[float]:
        """Takes so many seconds again and again; returns when each was over."""
        done = []
        for _ in range(count):
            time = self.take(time, seconds)
            done.append(time)
        return done

    def forget(self, time: float) -> None:
        """Nobody asks for anything before a time any more."""
        place = bisect_right(self._ends, time)
        del self._begins[:place], self._ends[:place]


class Cores:
    """As many threads as want to work do."""

    taken_s = 0.0

    def take(self, time: float, seconds: float) -> float:
        """Returns when they are over."""
        self.taken_s += seconds
        return time + seconds

    def take_each(self, time: float, seconds: float, count: int) -> list[float]:
        """Returns when each of so many is over, one after the other."""
        self.taken_s += count * seconds
        return list(accumulate(repeat(seconds, count), initial=time))[1:]

    def forget(self, time: float) -> None:
        """Nothing is remembered."""
