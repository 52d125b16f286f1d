"""How fast a queue gets shorter, measured."""

from __future__ import annotations

from typing import Final

MEMORY: Final = 512
"""Ends after which one counts 1/e."""
MIN_ENDS: Final = 16
"""Ends that must have been seen before anything is told."""


class DrainRate:
    """Requests that end in a second while others wait for their places; times without anybody waiting do not count."""

    def __init__(self) -> None:
        self._ends = 0.0
        self._seconds = 0.0
        self._num_ends = 0
        self._since: float | None = None
        """Somebody waits, and what has passed until here is counted; None: nobody does."""

    def waits(self, now: float, waits: bool) -> None:
        """Whether somebody waits from now on."""
        if waits and self._since is None:
            self._since = now
        elif not waits and self._since is not None:
            self._seconds += now - self._since
            self._since = None

    def ended(self, now: float) -> None:
        """A request has ended and left its place to the next."""
        if self._since is None:
            return
        keep = 1 - 1 / MEMORY
        self._seconds = self._seconds * keep + now - self._since
        self._ends = self._ends * keep + 1
        self._since = now
        self._num_ends += 1

    def per_second(self, now: float) -> float | None:
        """None until enough has been seen."""
        seconds = self._seconds + (0.0 if self._since is None else now - self._since)
        return self._ends / seconds if self._num_ends >= MIN_ENDS and seconds > 0 else None
