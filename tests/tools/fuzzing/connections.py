"""The HTTP server's input, cut into pieces in two ways: the requests it reads must not depend on the pieces."""

from __future__ import annotations

import asyncio
from typing import Any

from support.connection_harness import CHUNKED, DECLARED, GET, connected, settle

CONNECTIONS = (
    GET % 1 + DECLARED % 2 + CHUNKED % 3 + GET % 4,
    b"POST /1 HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\nhello" + GET % 2,
    b"GET http://b:80/1?x#y HTTP/1.0\r\nContent-Length: 0\r\n\r\n" + GET % 2,
    b"HEAD /1 HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, keep-alive\r\nUpgrade: h2c\r\n\r\n" + CHUNKED % 2,
    b"OPTIONS * HTTP/1.1\r\nHost: [::1]:8835\r\nConnection: close\r\n\r\n" + GET % 2,
    b"CONNECT /1 HTTP/1.1\r\nHost: a\r\nContent-Length: 00000000000000000003\r\n\r\nabc" + GET % 2,
)


def read_connections(data: bytes) -> None:
    """Read the bytes whole and in pieces; the first byte gives the length of the pieces."""
    whole, cut = _answered(data[1:], 1 + len(data)), _answered(data[1:], 1 + sum(data[:1]) % 64)
    assert whole == cut, f"in pieces {cut}"


def _answered(data: bytes, size: int) -> tuple[list[int], list[str]]:
    """Return statuses, and the paths that the application received."""
    faults: list[dict[str, Any]] = []

    async def run() -> tuple[list[int], list[str]]:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        async with connected(max_request_body_bytes=1000) as (server, connection, transport):
            for begin in range(0, len(data), size):
                connection.data_received(data[begin : begin + size])
                await settle()
            written = b""
            while written != transport.written:
                written = transport.written
                await settle()
            return transport.statuses, server.app.paths

    answered = asyncio.run(run())
    assert not faults, f"left to the event loop: {faults[0]}"
    return answered
