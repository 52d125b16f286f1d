"""Handing to TLS what arrives, little at a time."""

from __future__ import annotations

import asyncio
import contextvars
import ssl
from typing import Any, Final

from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]

from llm_serving.server.front_door.connection import Connection
from llm_serving.server.front_door.reader import Reader
from llm_serving.server.front_door.turns import Turns

READ_BYTES: Final = 16 * 1024
"""Most bytes that are read of a connection before TLS has had them, and that the kernel is asked to keep of it (it
doubles them)."""
SLICE_BYTES: Final = 1024
"""Bytes that TLS gets at once: 38 records that change the key take a millisecond."""
_BUFFER: Final = memoryview(bytearray(READ_BYTES))
"""One for all connections: what is read is copied out at once."""


class Deciphering(asyncio.BufferedProtocol):
    """Stands between a connection's socket and the event loop's layer of TLS, to each of which it is the other.

    The layer deciphers all it gets before anybody else has a turn, and records may hold nothing that a request is made
    of. So it gets a slice after the other, as long as there is time in the turn, and nothing is read meanwhile.

    Args:
        loop: Its thread makes all calls.
        connection: Gets what was deciphered.
        context: Of the certificate.
        handshake: Done when the handshake is.
        handshake_timeout_s: Seconds for it.
        shutdown_timeout_s: Seconds to take leave.
        turns: In which slices are handed on.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: Connection,
        context: ssl.SSLContext,
        handshake: asyncio.Future[None],
        handshake_timeout_s: float,
        shutdown_timeout_s: float,
        turns: Turns,
    ) -> None:
        self._tls: Any = SSLProtocol(
            loop,
            Reader(connection),
            context,
            handshake,
            server_side=True,
            ssl_handshake_timeout=handshake_timeout_s,
            ssl_shutdown_timeout=shutdown_timeout_s,
        )
        self._secured: Any = None
        """The transport of what is deciphered."""
        self._connection = connection
        self._turns = turns
        self._held = memoryview(b"")
        self._is_new = True
        """Whether it has had nothing: its first slice is part of the turn in which it was welcomed."""
        self._is_scheduled = False
        self._is_paused = False
        """Whether TLS wants no more for now."""
        self._is_full = False
        """Whether much is enciphered that the client does not take."""
        self._is_reading = True

    def abandon(self) -> None:
        """Ends a connection whose handshake is given up."""
        if self._secured is not None:
            self._secured.close()

    # The socket's calls

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.get_extra_info = transport.get_extra_info
        self.write, self.close = transport.write, transport.close
        self._buffer = self._tls.get_buffer(SLICE_BYTES)
        self._secured = self._tls._get_app_transport(contextvars.copy_context())
        self._secured.set_read_buffer_limits(1)  # it keeps nothing that its own reader does not want yet
        self._tls.connection_made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self._held = memoryview(bytes(self._held) + _BUFFER[:nbytes])
        if self._is_new:
            self._is_new = False
            self._hand_on()
        if self._turns.has_time and not self._is_scheduled:
            self._go_on()
        else:
            self._take_turns()
        self._set_reading()

    def pause_writing(self) -> None:
        """What TLS answers by itself, changes of the key for instance, would wait in memory without a bound."""
        self._is_full = True
        self._tls.pause_writing()
        self._set_reading()

    def resume_writing(self) -> None:
        self._is_full = False
        self._tls.resume_writing()
        self._go_on_reading()

    def eof_received(self) -> bool | None:
        return bool(self._tls.eof_received())

    def connection_lost(self, exc: Exception | None) -> None:
        self._held = memoryview(b"")
        self._tls.connection_lost(exc)
        # What refers to itself stays until a search for such things.
        self._tls = self._secured = self._buffer = None

    # The calls of TLS

    def pause_reading(self) -> None:
        self._is_paused = True
        self._set_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._go_on_reading()

    def _force_close(self, exc: BaseException | None) -> None:
        self._held = memoryview(b"")
        self._transport._force_close(exc)

    # In turns

    @property
    def _is_held_back(self) -> bool:
        return self._is_paused or self._is_full

    def _go_on_reading(self) -> None:
        self._take_turns()
        self._set_reading()

    def _take_turns(self) -> None:
        if self._held and not self._is_scheduled:
            self._is_scheduled = True
            self._turns.do_later(self._connection.address, self._have_turn)

    def _have_turn(self) -> None:
        self._is_scheduled = False
        if self._tls is not None:
            connection, had_turn = self._connection, self._connection.has_turn
            connection.has_turn = True
            self._go_on()
            connection.has_turn &= had_turn
            self._set_reading()

    def _go_on(self) -> None:
        if not self._turns.part(self._hand_on):
            self._take_turns()

    def _hand_on(self) -> bool:
        """Whether there is more to be handed on at once."""
        if self._held and not self._is_held_back and self._tls is not None:
            piece, self._held = self._held[:SLICE_BYTES], self._held[SLICE_BYTES:]
            self._buffer[: len(piece)] = piece
            self._tls.buffer_updated(len(piece))
        return bool(self._held) and not self._is_held_back

    def _set_reading(self) -> None:
        is_reading = not (self._held or self._is_held_back)
        if is_reading != self._is_reading and not self._transport.is_closing():
            self._is_reading = is_reading
            if is_reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
