"""What is known of a WorkAgent that is being started again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OVERDUE: Final = 2.0
"""An attempt that takes so many times as long as the first start may never end."""


@dataclass(frozen=True, slots=True)
class Away:
    """Written by the engine's thread, read by any; seconds are those of its clock."""

    reason: str
    """Of the newest attempt."""
    since: float
    """When the last WorkAgent was lost."""
    begins: float
    """When the newest attempt begins, after its pause."""
    load_s: float
    """Seconds that the first WorkAgent took until it was ready."""
    num_failed: int
    """Attempts that failed since."""
    num_restarts: int
    """Attempts in a row without a step in between, the newest included."""
    max_restarts: int
    """After so many of them nobody should count on it."""

    @property
    def used_up(self) -> bool:
        return self.num_restarts > self.max_restarts

    def predicted_s(self, now: float) -> float | None:
        """Until it is ready; None when that cannot be told: attempts have failed, or this one takes too long."""
        if self.num_failed or self.used_up or now - self.begins > OVERDUE * self.load_s:
            return None
        return max(self.begins + self.load_s - now, 0.0)

    def retry_after_s(self, now: float) -> float:
        """When a client has a chance: if the newest attempt is as quick as the first start."""
        return max(self.begins + self.load_s - now, 1.0)

    def __str__(self) -> str:
        if self.used_up:
            return f"was started {self.max_restarts} times in a row without a step; trying on: {self.reason}"
        return f"is started again: {self.reason}"
