"""State of a WorkAgent's restart, and the cancellation of starts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

SLOW_FACTOR: Final = 2.0
"""No remaining time is predicted once an attempt has taken this many times as long as the first start."""


@dataclass(frozen=True, slots=True)
class RestartStatus:
    """State of a restart, with times on the engine's clock. Only the engine's thread writes it."""

    reason: str
    lost_at: float
    """Time at which the last working WorkAgent was lost."""
    attempt_at: float
    """Time at which the latest attempt starts, after its delay."""
    load_s: float
    num_failed: int
    num_restarts: int
    """Number of consecutive attempts without a completed step, including the latest."""
    max_restarts: int
    """Maximum `num_restarts` at which the WorkAgent is still expected to recover."""

    @property
    def restarts_exhausted(self) -> bool:
        return self.num_restarts > self.max_restarts

    def predicted_s(self, now: float) -> float | None:
        """Return the predicted seconds until the WorkAgent is ready; None: an attempt failed or is too slow."""
        if self.num_failed or self.restarts_exhausted or now - self.attempt_at > SLOW_FACTOR * self.load_s:
            return None
        return max(self.attempt_at + self.load_s - now, 0.0)

    def retry_after_s(self, now: float) -> float:
        """Return after how many seconds a client should retry, if this attempt takes as long as the first start."""
        return max(self.attempt_at + self.load_s - now, 1.0)

    def __str__(self) -> str:
        if self.restarts_exhausted:
            return f"completed no step after {self.max_restarts} restarts in a row; retrying: {self.reason}"
        return f"is being restarted: {self.reason}"


class StartCancellation:
    """Cancels all starts of WorkAgents: it ends all `wait` calls and calls the registered callbacks. Thread-safe."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_cancelled(self) -> bool:
        return self._event.is_set()

    def cancel(self) -> None:
        with self._lock:
            self._event.set()
            for callback in self._callbacks:
                callback()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the cancellation, at most `timeout_s` seconds. Return whether it happened."""
        return self._event.wait(timeout_s)

    @contextmanager
    def on_cancel(self, callback: Callable[[], None]) -> Iterator[None]:
        """Return a context in which a cancellation calls `callback`, or calls it at once if cancelled before."""
        with self._lock:
            if self._event.is_set():
                callback()
            self._callbacks.append(callback)
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.remove(callback)
