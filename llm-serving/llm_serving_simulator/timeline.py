"""Virtual seconds: what happens when, and clocks that go on only when somebody waits."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from typing import TypeVar

from llm_serving_simulator.interpreter import Cores, Interpreter

T = TypeVar("T")

Action = Callable[[], None]


class Timeline:
    """What is to happen, the earliest first; of things at one time, what was put here first."""

    def __init__(self) -> None:
        self.now = 0.0
        """Of what happened last."""
        self.acts = False
        """Whether something is happening at this moment."""
        self._heap: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now

    @property
    def next(self) -> float:
        """Infinite where nothing is to happen."""
        return self._heap[0][0] if self._heap else math.inf

    def at(self, time: float, action: Action) -> None:
        """Has `action` happen at a time, or now if that has passed."""
        heapq.heappush(self._heap, (max(time, self.now), next(self._order), action))

    def run_until(self, time: float) -> None:
        """Lets all happen up to a time, that included."""
        while self._heap and self._heap[0][0] <= time:
            self.now, _, action = heapq.heappop(self._heap)
            self.acts = True
            action()
            self.acts = False


class EngineClock:
    """The time in the thread of one engine, which may be ahead of what has happened elsewhere."""

    def __init__(self, master: Interpreter | Cores) -> None:
        self.now = 0.0
        self._master = master

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        """Works, as soon as the master's other threads let it."""
        self.now = self._master.take(self.now, seconds)

    def reach(self, time: float) -> None:
        """Goes on to a time, never back."""
        self.now = max(self.now, time)


class VirtualLoop:
    """The event loop, as far as engines call it from their threads."""

    def __init__(self, timeline: Timeline) -> None:
        self.clock = EngineClock(Cores())
        """Of the engine that calls."""
        self._timeline = timeline

    def call_soon_threadsafe(self, callback: Callable[[T], None], argument: T, /) -> None:
        if self._timeline.acts:  # on the event loop itself
            callback(argument)
        else:
            self._timeline.at(self.clock.now, lambda: callback(argument))
