"""That there shall be no WorkAgent any more, told to whoever waits for one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
