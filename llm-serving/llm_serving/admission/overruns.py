"""How much of a step is left when it has run for a while: what those of late had left that ran as long.

A step that takes longer than expected is not about to end: of many that take some 3 ms, one that has run for 4 may take
8. Whoever comes meets the long ones more often than the short ones, too.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from typing import Final

MEMORY: Final = 256
"""Steps that are remembered, the newest."""
MIN_STEPS: Final = 32
"""Of them, before they tell anything."""
MOST: Final = 4.0
"""No step counts as longer, beside what was expected: something held it up that does not hold up others."""


class Overruns:
    """Times of steps, as multiples of what was expected of each; one thread writes, any may read `ascending`."""

    def __init__(self) -> None:
        self.ascending: Sequence[float] = ()
        """Never changed in place."""
        self._newest: deque[float] = deque()

    def add(self, seconds: float, expected_s: float) -> None:
        """A step has been computed; one of which nothing was expected teaches nothing."""
        if expected_s <= 0:
            return
        ascending = list(self.ascending)
        if len(self._newest) == MEMORY:
            ascending.remove(self._newest.popleft())
        time = min(MOST, seconds / expected_s)
        self._newest.append(time)
        insort(ascending, time)
        self.ascending = ascending


def remaining(ascending: Sequence[float], elapsed: float) -> float:
    """What is left of a step after so much of what was expected of it, as a multiple of that as well.

    Nothing of one that has run longer than all the others: there is no telling.
    """
    if len(ascending) < MIN_STEPS:
        return max(0.0, 1.0 - elapsed)
    longer = ascending[bisect_right(ascending, elapsed) :]
    return sum(longer) / len(longer) - elapsed if longer else 0.0
