"""How much of the master's time goes into blocks on their way, while its engines have steps to form."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from llm_serving.core.clock import Clock, monotonic

SHARE: Final = 0.5
"""Of one core's time, of all threads that bring blocks together, while a step is under way."""


class _Computed(threading.local):
    """By a thread, when it rested last."""

    seconds = 0.0


class Pace:
    """Of threads that bring blocks in pieces: after each they wait as long as all of them together computed, so that
    blocks never take more than `SHARE` of one core from who forms steps. While no step is under way nobody waits.

    Args:
        has_steps: Whether a step is under way anywhere.
        clock: Of the time that goes by.
        own_time: What the calling thread has computed.
        pause: Waits so many seconds.
    """

    def __init__(
        self,
        has_steps: Callable[[], bool],
        clock: Clock = monotonic,
        own_time: Clock = time.thread_time,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._has_steps, self._clock, self._own_time, self._pause = has_steps, clock, own_time, pause
        self._lock = threading.Lock()
        self._computed = _Computed()
        self._even_at = 0.0
        """When what was computed so far is `SHARE` of the time since."""

    def rest(self) -> None:
        """To be called between two pieces: waits until what was computed is `SHARE` of the time gone by."""
        computed = self._own_time()
        took_s, self._computed.seconds = computed - self._computed.seconds, computed
        if not self._has_steps():
            return
        with self._lock:
            now = self._clock()
            self._even_at = max(self._even_at, now - took_s) + took_s / SHARE
            wait_s = self._even_at - now
        self._pause(wait_s)
