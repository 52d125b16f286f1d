"""Decrypts what a client sends, little at a time, so that its TLS records do not delay other connections."""

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
"""Maximum number of records of a client that are decrypted in one iteration of the event loop."""
MAX_EMPTY_RECORDS: Final = 32
"""Maximum number of records without data in the life of a connection. A handshake takes three to five. A client changes
its key after millions of records.
"""
HEADER_BYTES: Final = 5
"""Bytes in front of each record. The last two are its length."""
READ_BYTES: Final = RECORDS_AT_ONCE * 16 * 1024


class TlsRecords(asyncio.BufferedProtocol):
    """Passes the records of a client on to uvloop's TLS, one at a time, and closes a connection with too many records
    without data. Such records are cheap to send, but each change of a key takes the server about 20 us. A connection
    that is closing already drops further records instead, so that the client can read the last response.
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
        self._decrypted: Any = None
        self._begin = self._end = 0
        """Bounds of the bytes in uvloop's buffer that have not been passed on."""
        self._num_missing = 0
        """Bytes of the current record that have not been passed on."""
        self._num_empty = 0
        self._is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._decrypted = self._tls._get_app_transport(contextvars.copy_context())  # writes need the context
        self._tls.connection_made(transport)

    def abort(self) -> None:
        if self._decrypted is not None:
            self._decrypted.abort()

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
        """Pass nothing on. Unlike in uvloop's TLS, encrypted bytes wait here, where their records are still counted."""
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
            self._decrypt()
        self._transport.pause_reading()
        self._loop.call_soon(self._pass_on)

    def _decrypt(self) -> None:
        """Pass on what has been received of the current record, and count the record if that brings no data."""
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
