"""The clock of the simulation."""

from __future__ import annotations


class Clock:
    """A clock whose time is set by the simulation."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now
