"""Answers that last: server-sent events, and the watch for clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from llm_serving.errors import LLMServingError, WorkerError
from llm_serving.log import get_logger

logger = get_logger(__name__)

EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
DONE: Final = b"data: [DONE]\n\n"
_encode: Final = msgspec.json.Encoder().encode

T = TypeVar("T")


class Closable(Protocol):
    async def aclose(self) -> None: ...


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


def event(content: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(content) + b"\n\n"


class StreamResponse(Response):
    """Sends pieces of bytes as they come, one write a piece; ends the generation when the client leaves.

    Args:
        pieces: The body. It must not need closing itself: `source` is what holds resources.
        source: Closed at the end, whatever the end.
        error_piece: Makes the last piece when the generation fails, as the status has been sent by then.
        media_type: Content type.
        headers: Further headers.
    """

    def __init__(
        self,
        pieces: AsyncIterator[bytes],
        source: Closable,
        error_piece: Callable[[LLMServingError], bytes],
        *,
        media_type: str = EVENT_STREAM,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._pieces = pieces
        self._source = source
        self._error_piece = error_piece
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientGoneError):
                await run_until_client_leaves(receive, self._send_all(send))
        finally:
            await self._source.aclose()

    async def _send_all(self, send: Callable[[Message], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except LLMServingError as error:
            await send({"type": "http.response.body", "body": self._error_piece(error), "more_body": True})
        except Exception:
            logger.exception("a stream failed")
            await send({"type": "http.response.body", "body": self._error_piece(internal_error()), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def internal_error() -> LLMServingError:
    """What a client is told of an error of ours; the log has the rest."""
    return WorkerError("internal error")


async def complete(request: Request, source: Closable, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; `source` is closed at the end, whatever the end.

    Raises:
        ClientGoneError: The client left before; the work was cancelled.
    """
    try:
        return await run_until_client_leaves(request.receive, work)
    finally:
        await source.aclose()


async def run_until_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` beside a watch on the connection; the request's body must have been read."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_client_leaves(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for future in (task, watch):
            if not future.done():
                future.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await future


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
