"""The head of an answer and what follows it at once, in one write."""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class JoinedHead:
    """Stands between an answer and its transport until the head is written.

    The head waits for the first bytes behind it, until the loop's next turn at most: two writes would wake the client
    twice, and a short answer costs little else. A stream whose first piece is still to come loses nothing by it.
    """

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._loop = loop
        self._head = b""
        cycle.transport = cast(asyncio.Transport, self)

    def write(self, data: bytes) -> None:
        if self._head:
            self._pass(self._head + data)
        else:
            self._head = data
            self._loop.call_soon(self.go_on)

    def close(self) -> None:
        self.go_on()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def go_on(self) -> None:
        """The head waits no longer."""
        if self._head:
            self._pass(self._head)

    def _pass(self, data: bytes) -> None:
        self._head = b""
        self._cycle.transport = self._transport
        if not self._transport.is_closing():
            self._transport.write(data)
