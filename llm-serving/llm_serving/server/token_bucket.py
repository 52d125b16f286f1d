"""So much a minute, in bursts of so much."""

from __future__ import annotations


class TokenBucket:
    """Holds `capacity` at most, is full at first, and gains that much a minute.

    What is taken may exceed what there is: the level falls below 0 and rises again with time.
    """

    def __init__(self, capacity: float, now: float) -> None:
        self.capacity = capacity
        self._per_s = capacity / 60.0
        self._level = capacity
        self._at = now

    def resized(self, capacity: float, now: float) -> TokenBucket:
        """One of another capacity with what is in this one, as far as it has room for it."""
        other = TokenBucket(capacity, now)
        other._level = min(capacity, self.level(now))
        return other

    def level(self, now: float) -> float:
        return min(self.capacity, self._level + (now - self._at) * self._per_s)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until there is so much; of more than it can hold, until it is full. 0: there is."""
        return max(0.0, (min(amount, self.capacity) - self.level(now)) / self._per_s)

    def take(self, amount: float, now: float) -> None:
        """Takes so much; a negative amount is given back."""
        self._level, self._at = self.level(now) - amount, now
