"""Clients of HTTP/1.0, proxies with their defaults among them: they know neither chunks nor 100 Continue."""

from __future__ import annotations

from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

OLDER: Final = "1.0"


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
