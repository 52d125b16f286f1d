"""Virtual time: the event queue, clocks of engines, and the CPU time that the master's threads share."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate, repeat
from typing import TypeVar

T = TypeVar("T")

Action = Callable[[], None]


class EventQueue:
    """Actions by time; actions of the same time run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self.is_running = False
        """Whether an action runs at this moment."""
        self._heap: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now

    @property
    def next_time(self) -> float:
        """Time of the next action; infinite for an empty queue."""
        return self._heap[0][0] if self._heap else math.inf

    def at(self, time: float, action: Action) -> None:
        """Schedule an action; one in the past runs now."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._order), action))

    def run_until(self, time: float) -> None:
        while self._heap and self._heap[0][0] <= time:
            self.now, _, action = heapq.heappop(self._heap)
            self.is_running = True
            action()
            self.is_running = False


class SharedInterpreter:
    """CPU time of threads that share one interpreter, as disjoint busy spans in ascending order.

    Threads do not reserve time in the order of their times. So a reservation fills the free time from its start on, in
    as many pieces as necessary: an interpreter switches threads every few milliseconds.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._starts: list[float] = []
        self._ends: list[float] = []

    def reserve(self, time: float, seconds: float) -> float:
        """Reserve CPU time from `time` on; return when it is over."""
        if seconds <= 0:
            return time
        self.busy_s += seconds
        first = last = bisect_right(self._ends, time)
        start, end, left = time, time, seconds
        while last < len(self._starts):
            free = max(0.0, self._starts[last] - end)
            if left <= free:
                break
            left -= free
            end = self._ends[last]
            last += 1
        if last > first:
            start = min(start, self._starts[first])
        end += left
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        return end

    def reserve_each(self, time: float, seconds: float, count: int) -> list[float]:
        """Reserve `seconds` `count` times, one after the other; return when each is over."""
        ends = []
        for _ in range(count):
            time = self.reserve(time, seconds)
            ends.append(time)
        return ends

    def forget_before(self, time: float) -> None:
        """Drop spans that end before a time, when no thread reserves time before it any more."""
        index = bisect_right(self._ends, time)
        del self._starts[:index], self._ends[:index]


class SeparateCores:
    """CPU time of threads that never wait for each other."""

    busy_s = 0.0

    def reserve(self, time: float, seconds: float) -> float:
        self.busy_s += seconds
        return time + seconds

    def reserve_each(self, time: float, seconds: float, count: int) -> list[float]:
        """Return when each of `count` reservations, one after the other, is over."""
        self.busy_s += count * seconds
        return list(accumulate(repeat(seconds, count), initial=time))[1:]

    def forget_before(self, time: float) -> None: ...


MasterCPU = SharedInterpreter | SeparateCores


class EngineClock:
    """The time of one engine's thread, which may be ahead of the event queue."""

    def __init__(self, master: MasterCPU) -> None:
        self.now = 0.0
        self._master = master

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        """Advance by CPU time, as soon as the master's other threads leave it."""
        self.now = self._master.reserve(self.now, seconds)

    def advance_to(self, time: float) -> None:
        self.now = max(self.now, time)


class VirtualEventLoop:
    """The event loop with the methods that engines call from their threads."""

    def __init__(self, events: EventQueue) -> None:
        self.clock = EngineClock(SeparateCores())
        """Clock of the engine that calls."""
        self._events = events

    def call_soon_threadsafe(self, callback: Callable[[T], None], argument: T, /) -> None:
        if self._events.is_running:  # the caller is the event loop itself
            callback(argument)
        else:
            self._events.at(self.clock.now, lambda: callback(argument))
