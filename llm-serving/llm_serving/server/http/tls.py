"""Decrypts a few TLS records of each connection at a time, so that one client does not delay the others."""

from __future__ import annotations

import asyncio
import contextvars
import ssl
from typing import TYPE_CHECKING, Any, Final

from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from llm_serving.server.http.connection import Connection

TLS_SHUTDOWN_S: Final = 2.0
RECORDS_AT_ONCE: Final = 8
"""Maximum number of records of one connection that are decrypted in one iteration of the event loop."""
MAX_EMPTY_RECORDS: Final = 32
"""Maximum number of records without data during the life of a connection. A handshake needs three to five. Honest
clients rarely add others: they update their key only after millions of records.
"""
HEADER_BYTES: Final = 5
"""Bytes of the header in front of each record. The last two are the length of the rest of the record."""
READ_BYTES: Final = RECORDS_AT_ONCE * 16 * 1024
"""Maximum number of encrypted bytes that are read from the socket at once."""


class TlsRecords(asyncio.BufferedProtocol):
    """Passes the records of one connection to uvloop's `SSLProtocol`, one at a time, and closes the connection after
    `MAX_EMPTY_RECORDS` records without data. Such records cost the client little, but each update of a key takes the
    server about 20 us. If the connection is closing already, further records are dropped instead, so that the client
    can read the last response.
    """

    def __init__(self, connection: Connection, context: ssl.SSLContext, handshake_timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.handshake: asyncio.Future[None] = self._loop.create_future()
        self._tls: Any = SSLProtocol(
            self._loop,
            connection,
            context,
            self.handshake,
            server_side=True,
            ssl_handshake_timeout=handshake_timeout_s,
            ssl_shutdown_timeout=TLS_SHUTDOWN_S,
        )
        self._connection = connection
        self._transport: Any = None
        self._app_transport: Any = None
        self._begin = self._end = 0
        """Bounds of the bytes in uvloop's buffer that have not been passed on."""
        self._num_missing = 0
        """Bytes of the current record that have not been passed on."""
        self._num_empty = 0
        self._is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._app_transport = self._tls._get_app_transport(
            contextvars.copy_context()
        )  # `SSLProtocol` runs writes in this context
        self._tls.connection_made(transport)

    def abort(self) -> None:
        if self._app_transport is not None:
            self._app_transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._tls.connection_lost(exc or ConnectionAbortedError())  # without an error, a handshake would count as done

    def pause_writing(self) -> None:
        self._tls.pause_writing()

    def resume_writing(self) -> None:
        self._tls.resume_writing()

    def eof_received(self) -> None:
        self._tls.eof_received()

    def get_buffer(self, sizehint: int) -> Any:
        buffer, num_held = self._tls.get_buffer(sizehint), self._end - self._begin
        buffer[:num_held] = buffer[self._begin : self._end]
        self._begin, self._end = 0, num_held
        return buffer[num_held : num_held + READ_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        self._pass_on()

    def pause_reading(self) -> None:
        """Stop reading and decrypting. What has been received waits encrypted, and is decrypted and counted later."""
        self._is_paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._loop.call_soon(self._pass_on)

    def _pass_on(self) -> None:
        for _ in range(RECORDS_AT_ONCE):
            if self._is_paused or self._transport.is_closing():
                return
            if self._num_empty > MAX_EMPTY_RECORDS:  # the connection is closing
                self._begin = self._end
            if self._end - self._begin < (1 if self._num_missing else HEADER_BYTES):
                self._transport.resume_reading()
                return
            self._pass_piece()
        self._transport.pause_reading()
        self._loop.call_soon(self._pass_on)

    def _pass_piece(self) -> None:
        """Pass the received part of the current record to uvloop. Count a complete record if it has brought no data."""
        buffer, begin = self._tls.get_buffer(0), self._begin
        if not self._num_missing:
            self._num_missing = HEADER_BYTES + int.from_bytes(buffer[begin + 3 : begin + HEADER_BYTES])
        size = min(self._num_missing, self._end - begin)
        self._begin += size
        self._num_missing -= size
        self._connection.has_received = False
        buffer[:size] = buffer[begin : self._begin]  # uvloop reads the beginning of the buffer
        self._tls.buffer_updated(size)
        if not (self._num_missing or self._connection.has_received):
            self._num_empty += 1
            if self._num_empty > MAX_EMPTY_RECORDS and not self._connection.is_closing():
                self.abort()
