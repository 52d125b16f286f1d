"""What one more token costs in a step, from steps as they were."""

from __future__ import annotations

from typing import Final

MEMORY: Final = 256
"""Steps after which what one of them said counts 1/e."""


class StepCost:
    """A line through the newest steps that only decoded: seconds over tokens, by weighted least squares."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = self._tokens2 = self._product = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        keep = 1 - 1 / MEMORY
        self._weight = keep * self._weight + 1
        self._tokens = keep * self._tokens + num_tokens
        self._seconds = keep * self._seconds + seconds
        self._tokens2 = keep * self._tokens2 + num_tokens**2
        self._product = keep * self._product + num_tokens * seconds

    @property
    def seconds_a_token(self) -> float:
        """The slope; 0 as long as all steps were alike, so that something is tried."""
        spread = self._weight * self._tokens2 - self._tokens**2
        if spread <= 1e-9 * self._tokens2 * self._weight:
            return 0.0
        return max(0.0, (self._weight * self._product - self._tokens * self._seconds) / spread)

    def seconds_of(self, num_tokens: int) -> float:
        """Of a step of so many tokens; 0 before the first."""
        if not self._weight:
            return 0.0
        mean = self._seconds / self._weight
        return max(0.1 * mean, mean + self.seconds_a_token * (num_tokens - self._tokens / self._weight))
