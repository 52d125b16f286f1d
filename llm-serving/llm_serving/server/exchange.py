"""When an HTTP request came and when its answer had been written."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Final

from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from llm_serving.core.clock import Clock
from llm_serving.core.exchange import Exchange

SCOPE_KEY: Final = "llm_serving.exchange"


def begin_exchange(request: Request, clock: Clock) -> Exchange:
    """Notes that a request has come; `exchange_of` finds the note."""
    exchange = Exchange(clock())
    request.scope[SCOPE_KEY] = exchange
    return exchange


def exchange_of(connection: HTTPConnection) -> Exchange | None:
    """The note of `begin_exchange`; None where nobody took it."""
    exchange = connection.scope.get(SCOPE_KEY)
    assert exchange is None or isinstance(exchange, Exchange)
    return exchange


async def respond_timed(
    response: Response, exchange: Exchange, clock: Clock, scope: Scope, receive: Receive, send: Send
) -> None:
    """Sends a response as it is and notes when its last piece is handed over.

    The note is made just before: a client that has the whole answer never measures less than the server.
    """

    def send_and_note(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            exchange.answered_time = clock()
        return send(message)

    try:
        await response(scope, receive, send_and_note)
    finally:
        if exchange.answered_time is None:  # the client has left
            exchange.answered_time = clock()
