"""How fast a queue gets shorter, measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MEMORIES: Final = (512, 128)
"""Ends after which one counts 1/e: the longer one tells the rate, the shorter one when it has fallen."""
MIN_ENDS: Final = 16
"""Ends that must have been seen before anything is told."""


@dataclass(slots=True)
class _Mean:
    memory: int
    ends: float = 0.0
    seconds: float = 0.0


class DrainRate:
    """Requests that end in a second while others wait for their places; times without anybody waiting do not count.

    Of two means, over many ends and over few, the lower one is told. Who is told too early a time comes in vain, and
    costs what the others wait for; who is told too late a time leaves its place to others. So a server that becomes
    slower is believed at once, and one that becomes faster later.
    """

    def __init__(self) -> None:
        self._means = [_Mean(memory) for memory in MEMORIES]
        self._num_ends = 0
        self._since: float | None = None
        """Somebody waits, and what has passed until here is counted; None: nobody does."""

    def waits(self, now: float, waits: bool) -> None:
        """Whether somebody waits from now on."""
        if waits and self._since is None:
            self._since = now
        elif not waits and self._since is not None:
            for mean in self._means:
                mean.seconds += now - self._since
            self._since = None

    def ended(self, now: float) -> None:
        """A request has ended and left its place to the next."""
        if self._since is None:
            return
        for mean in self._means:
            keep = 1 - 1 / mean.memory
            mean.seconds = mean.seconds * keep + now - self._since
            mean.ends = mean.ends * keep + 1
        self._since = now
        self._num_ends += 1

    def per_second(self, now: float) -> float | None:
        """None until enough has been seen."""
        more = 0.0 if self._since is None else now - self._since
        if self._num_ends < MIN_ENDS or any(mean.seconds + more <= 0 for mean in self._means):
            return None
        return min(mean.ends / (mean.seconds + more) for mean in self._means)
