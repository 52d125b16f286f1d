"""Ending a connection in bounded time, whatever the client does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from llm_serving.server.front_door.slow_reader import SlowReader

LINGER_S: Final = 2.0
"""Seconds a client gets to read a refusal while it still sends: closing on unread bytes may destroy the answer."""
LINGER_LEAST_BYTES: Final = 64 * 1024
"""Whoever sends as much meanwhile gets as long again ..."""
LINGER_BYTES: Final = 4 * 2**20
"""... up to so many bytes, which are read and dropped."""
TLS_LEAVE_S: Final = 0.2
"""Seconds a client that has taken everything gets to take leave of TLS: nobody needs its word."""
PIECE_BYTES: Final = 64 * 1024
"""Most bytes that are handed to TLS at once."""


class PartingTransport:
    """A transport whose `close` always ends, as the rest of the server sees it.

    Where the client still sends, its bytes are read and dropped for a while. Where it does not take what was written,
    the connection is cut, see `SlowReader`.

    TLS passes on all it is given before it says that the client takes no more, and cuts what is not taken soon after
    its own end has begun. So it is given a long answer in pieces, and its end begins when these are taken.

    Args:
        transport: Of the event loop.
        is_sending: Whether the client may be in the middle of a request.
        write_timeout_s: Seconds without progress in taking what was written.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        is_sending: Callable[[], bool],
        write_timeout_s: float,
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._is_sending = is_sending
        self._reader = SlowReader(loop, transport.get_write_buffer_size, write_timeout_s, transport.abort)
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._num_dropped = 0
        self._num_dropped_before = 0
        """When the client was looked after last."""
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        self._is_paused = False
        self._ends_when_taken = False
        # Bound here, so that a piece of a stream passes one call less.
        self.write: Callable[[bytes], None] = partial(_write_in_pieces, transport) if self._is_tls else transport.write
        self.get_extra_info: Callable[..., Any] = transport.get_extra_info
        self.get_write_buffer_size = transport.get_write_buffer_size
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    @property
    def is_over(self) -> bool:
        """Whether nothing is read any more, not even to be dropped."""
        return self._transport.is_closing()

    @property
    def is_unread(self) -> bool:
        """Whether the last answer waits for the client to take it."""
        return self._reader.is_watched

    def close(self) -> None:
        """Ends the connection once what was written is taken; cuts it when that takes too long."""
        if self._closing:
            return
        self._closing = True
        if self._is_sending() and self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
            self._transport.resume_reading()
            self._linger()
            return
        if self._transport.get_write_buffer_size():
            self._reader.watch()
            self._ends_when_taken = self._is_tls and self._is_paused
        elif self._is_tls:
            self._timer = self._loop.call_later(TLS_LEAVE_S, self._transport.abort)
        if not self._ends_when_taken:
            self._transport.close()

    def leave(self) -> None:
        """The client sends no more: ends the connection once what was written is taken."""
        self._closing = True
        if self._transport.get_write_buffer_size():
            self._reader.watch()
        self._transport.close()

    def pause(self) -> None:
        """Much of what was written is not taken."""
        self._is_paused = True

    def resume(self) -> None:
        """What was written is taken, but for a little."""
        self._is_paused = False
        if self._ends_when_taken:
            self._transport.close()

    def drop(self, size: int) -> None:
        """Counts bytes that came after the end; cuts the connection when they do not cease."""
        self._num_dropped += size
        if self._num_dropped > LINGER_BYTES:
            self.abort()

    def abort(self) -> None:
        """Ends the connection at once."""
        self._closing = True
        self._transport.abort()

    def lost(self) -> None:
        """The connection has ended."""
        self._reader.leave()
        self._is_sending = bool  # False; it referred to the connection, which refers to this
        if self._timer is not None:
            self._timer.cancel()

    def _linger(self) -> None:
        self._num_dropped_before = self._num_dropped
        self._timer = self._loop.call_later(LINGER_S, self._end_lingering)

    def _end_lingering(self) -> None:
        if self._transport.get_write_buffer_size():  # the end of a long answer is still to be taken
            self._reader.watch()
        elif self._num_dropped - self._num_dropped_before >= LINGER_LEAST_BYTES:
            self._linger()
        else:
            self._transport.abort()


def _write_in_pieces(transport: asyncio.Transport, data: bytes) -> None:
    for begin in range(0, len(data), PIECE_BYTES):
        transport.write(data[begin : begin + PIECE_BYTES])
