"""What a connection does besides when the application sends and receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def close_unless_read(cycle: RequestResponseCycle, is_receiving: Callable[[], bool]) -> None:
    """The answer ends its connection if it begins before all of its request has come.

    Otherwise a client that has sent all of it would send its next request into a connection that is just closed.
    """
    send = cycle.send

    async def send_and_close(message: Any) -> None:
        if is_receiving() and not cycle.response_started:
            cycle.keep_alive = False
        await send(message)

    cycle.send = send_and_close  # type: ignore[method-assign]


def when_digested(cycle: RequestResponseCycle, call: Callable[[], None]) -> None:
    """Calls whenever the application asks for what comes after the end of the body: it has parsed it by then."""
    receive = cycle.receive

    async def receive_and_note() -> Any:
        if not cycle.more_body and not cycle.body:
            call()
        return await receive()

    cycle.receive = receive_and_note  # type: ignore[method-assign]
