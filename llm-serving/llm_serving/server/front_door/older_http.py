"""Clients of HTTP/1.0, proxies with their defaults among them: they know neither chunks nor 100 Continue."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

OLDER: Final = "1.0"
KNOWN: Final = (OLDER, "1.1")


def is_faulty(version: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a head promises what its version has not: whoever else reads it may see another end of the request.

    Args:
        version: As in `KNOWN`, or another that the parser lets pass.
        headers: Names in small letters.
    """
    return version not in KNOWN or (version == OLDER and any(name == b"transfer-encoding" for name, _ in headers))


def end_with_connection(cycle: RequestResponseCycle) -> None:
    """An answer whose length is not told goes out as it is and ends with its connection, as do all of HTTP/1.0."""
    cycle.waiting_for_100_continue = False
    send, is_framed = cycle.send, True

    async def send_unframed(message: Any) -> None:
        nonlocal is_framed
        if message["type"] == "http.response.start":
            is_framed = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if is_framed else False
        elif not is_framed:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unframed  # type: ignore[method-assign]
