"""How many lines of a kind a log takes, whatever clients do."""

from __future__ import annotations


class LineBudget:
    """Lets `burst` lines pass at once and `per_second` in the long run, and counts the others.

    It has no clock: times are given, in seconds, and never go back.
    """

    def __init__(self, burst: int, per_second: float) -> None:
        self._burst = float(burst)
        self._per_second = per_second
        self._left = float(burst)
        self._since = 0.0
        self._num_suppressed = 0

    def take(self, now: float) -> int | None:
        """How many lines were kept back since the last that passed; None: this one is kept back too."""
        self._left = min(self._burst, self._left + (now - self._since) * self._per_second)
        self._since = now
        if self._left < 1.0:
            self._num_suppressed += 1
            return None
        self._left -= 1.0
        suppressed, self._num_suppressed = self._num_suppressed, 0
        return suppressed
