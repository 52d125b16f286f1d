"""What is known of a WorkAgent that is being started again.

That there shall be no WorkAgent any more, told to whoever waits for one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class GivenUp:
    """Set once, from any thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._break_off: list[Callable[[], None]] = []

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        """Ends every pause, and breaks off what is under way."""
        with self._lock:
            self._event.set()
            for break_off in self._break_off:
                break_off()

    def wait(self, seconds: float) -> bool:
        """Waits for so long at most; returns whether it is set."""
        return self._event.wait(seconds)

    @contextmanager
    def breaks_off(self, break_off: Callable[[], None]) -> Iterator[None]:
        """Calls `break_off`, in the thread that sets this, if it is set meanwhile, and here if it is set already."""
        with self._lock:
            if self._event.is_set():
                break_off()
            self._break_off.append(break_off)
        try:
            yield
        finally:
            with self._lock:
                self._break_off.remove(break_off)
