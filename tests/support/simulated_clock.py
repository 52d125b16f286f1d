"""A clock that goes on when it is told to."""

from __future__ import annotations


class Clock:
    """Seconds that pass only when the simulation says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
