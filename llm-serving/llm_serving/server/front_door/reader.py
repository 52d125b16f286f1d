"""Reading from a transport, little at a time."""

from __future__ import annotations

import asyncio
from typing import Final

from llm_serving.server.front_door.connection import READ_BYTES, Connection

_BUFFER: Final = memoryview(bytearray(READ_BYTES))
"""One for all connections: what is read is copied out at once."""


class Reader(asyncio.BufferedProtocol):
    """What the event loop sees of a connection; its own reads are of 256 KiB, for as long as there is more."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.connection_made = connection.connection_made  # type: ignore[assignment]
        self.eof_received = connection.eof_received  # type: ignore[method-assign]
        self.pause_writing = connection.pause_writing  # type: ignore[method-assign]
        self.resume_writing = connection.resume_writing  # type: ignore[method-assign]

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)
        self.__dict__.clear()  # the layer of TLS keeps a method of this, and the connection that layer

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.data_received(bytes(_BUFFER[:nbytes]))
