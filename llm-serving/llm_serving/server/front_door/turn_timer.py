"""One deadline of a connection at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from llm_serving.server.front_door.turns import Turns


class TurnTimer:
    """Whoever is late is dealt with when it is the turn of the address, unless the timer is stopped until then.

    Args:
        loop: Its thread makes all calls.
        turns: A thousand may be late at once.
        address: Of the client.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, turns: Turns, address: str) -> None:
        self._loop = loop
        self._turns = turns
        self._address = address
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_set(self) -> bool:
        """Whether it runs, or has run out and was not stopped."""
        return self._handle is not None

    def start(self, delay_s: float, late: Callable[[], None]) -> None:
        self._handle = self._loop.call_later(delay_s, self._run_out, late)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _run_out(self, late: Callable[[], None]) -> None:
        handle = self._handle

        def act() -> None:
            if self._handle is handle:
                late()

        self._turns.do(self._address, act)
