"""When those who found no place at the door are to try again."""

from __future__ import annotations

import math
from typing import Final

MEMORY_S: Final = 2.0
"""Seconds after which one who got a place counts 1/e for the rate."""
SHARE: Final = 0.5
"""Of the rate at which places are got, for those who come again; the rest is for newcomers."""
LEAST_RATE: Final = 1.0
"""A second, whatever was seen."""
HORIZON_S: Final = 120
"""Nobody is told a longer time: clients in use wait no longer."""


class Comebacks:
    """Gives out times one after the other, as fast as others get places.

    Told the same second, all who were turned away would come again at once, find as little room, and each of them would
    cost the time that makes room.

    Args:
        now: Seconds on a clock that never goes back.
    """

    def __init__(self, now: float) -> None:
        self._seen = now
        self._num = 0.0
        self._last = now
        """The latest time that was given out."""

    def got_place(self, now: float) -> None:
        """Somebody did."""
        self._num = self._num * math.exp((self._seen - now) / MEMORY_S) + 1.0
        self._seen = now

    def seconds(self, now: float) -> int:
        """Whole seconds after which the next one may come, from 1 to `HORIZON_S`."""
        rate = self._num * math.exp((self._seen - now) / MEMORY_S) / MEMORY_S
        self._last = min(max(self._last, now) + 1.0 / max(LEAST_RATE, SHARE * rate), now + HORIZON_S)
        return max(1, math.ceil(self._last - now))
