"""How what a WorkAgent does beside its steps gives way to them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final

SHARE: Final = 0.1
"""Of one core's time, at most, while steps are computed."""


class BesideSteps:
    """Between the thread of the steps and another one, which works in small pieces and rests after each.

    Args:
        pause: Waits so many seconds.
    """

    def __init__(self, pause: Callable[[float], object] = time.sleep) -> None:
        self._pause = pause
        self._num_begun = self._num_seen = 0
        self._is_running = False

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step is computed meanwhile."""
        self._num_begun += 1
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def rest(self, took_s: float) -> None:
        """Waits until a piece that took so much of a core's time is `SHARE` of the time gone by; not at all if no step
        was computed since the piece before."""
        num_begun = self._num_begun
        if self._is_running or num_begun > self._num_seen:
            self._pause(took_s * (1 / SHARE - 1))
        self._num_seen = num_begun
