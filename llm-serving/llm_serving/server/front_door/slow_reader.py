"""How long a connection waits for a client that takes what was written to it slowly, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

TAKEN_BYTES: Final = 16 * 1024
"""What a client takes of a long answer within the time it has for that, at least."""


class SlowReader:
    """Watches what is written and not taken: a large answer on a slow line goes on, one that stands still ends.

    Args:
        loop: Runs the timer.
        unsent: Bytes that are written and not taken.
        timeout_s: Seconds to take `TAKEN_BYTES`, or all there is.
        cut: Ends the connection.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, unsent: Callable[[], int], timeout_s: float, cut: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._unsent = unsent
        self._timeout_s = timeout_s
        self._cut = cut
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_watched(self) -> bool:
        return self._timer is not None

    def watch(self) -> None:
        """Begins, or begins anew."""
        self.leave()
        self._timer = self._loop.call_later(self._timeout_s, self._look, self._unsent())

    def leave(self) -> None:
        """Watches no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, before: int) -> None:
        if 0 < self._unsent() <= before - TAKEN_BYTES:
            self.watch()
        else:
            self._cut()
