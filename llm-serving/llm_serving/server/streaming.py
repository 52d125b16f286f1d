"""Answers that last: server-sent events, and the watch for clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from llm_serving.core.request_output import RequestOutput
from llm_serving.errors import LLMServingError, WorkerError
from llm_serving.log import get_logger
from llm_serving.server.front_door import UNSENT_KEY
from llm_serving.server.front_door.lane import LANE_KEY, Lane
from llm_serving.server.generation import Generation

logger = get_logger(__name__)

EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
STREAM_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""That nothing on the way keeps or collects what is sent."""
DONE: Final = b"data: [DONE]\n\n"
_encode: Final = msgspec.json.Encoder().encode

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection before its answer was complete."""


def event(content: object) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(content) + b"\n\n"


def named_event(name: str, content: object) -> bytes:
    """One server-sent event with a name."""
    return b"event: " + name.encode() + b"\n" + event(content)


class Pieces(Protocol):
    """An answer as bytes, piece by piece."""

    def piece(self, index: int, output: RequestOutput) -> bytes:
        """What is told of this piece of a choice; may be empty.

        Raises:
            LLMServingError: The generation failed.
        """

    async def end(self) -> bytes:
        """What follows the last piece."""


class StreamResponse(Response):
    """Sends pieces of an answer as they come, one write a piece; ends the generation when the client leaves.

    Args:
        generation: Closed at the end, whatever the end.
        pieces: Puts its pieces into the form of a protocol.
        error_piece: Makes the last piece when the generation fails, as the status has been sent by then.
        media_type: Content type.
        headers: Further headers.
    """

    def __init__(
        self,
        generation: Generation,
        pieces: Pieces,
        error_piece: Callable[[LLMServingError], bytes],
        *,
        media_type: str = EVENT_STREAM,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._generation = generation
        self._pieces = pieces
        self._error_piece = error_piece
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers({**STREAM_HEADERS, **generation.headers, **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._generation.tell_waiting(scope.get(UNSENT_KEY))
        lane: Lane | None = scope.get(LANE_KEY)
        if lane is not None:
            self._generation.give_first(partial(lane.pass_on, self._pieces.piece))
        try:
            with contextlib.suppress(ClientGoneError):
                await complete(receive, self._generation, self._send_all(send))
        finally:
            self._generation.tell_waiting(None)
            self._generation.give_first(None)  # both refer to what refers to it

    async def _send_all(self, send: Callable[[Message], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        to_bytes, last = self._pieces.piece, b""
        num_left = self._generation.num_streams
        try:
            async for index, output in self._generation.outputs():
                piece = to_bytes(index, output)
                num_left -= output.finished
                if num_left == 0:
                    last = piece  # each write wakes the client: the last piece goes with the end
                elif piece:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            last += await self._pieces.end()
        except LLMServingError as error:
            last += self._error_piece(error)
        except Exception:
            logger.exception("a stream failed")
            last += self._error_piece(internal_error())
        await send({"type": "http.response.body", "body": last, "more_body": False})


def internal_error() -> LLMServingError:
    """What a client is told of an error of ours; the log has the rest."""
    return WorkerError("internal error")


async def complete(receive: Receive, generation: Generation, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; the generation is closed at the end, whatever the end.

    Raises:
        ClientGoneError: The client left before; the work was cancelled.
    """
    try:
        return await run_until_client_leaves(receive, work)
    finally:
        await generation.aclose()


async def run_until_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` beside a watch on the connection; the request's body must have been read."""
    task = asyncio.current_task()
    assert task is not None
    left = ended = False

    def break_off(watch: asyncio.Task[None]) -> None:
        nonlocal left
        # The loop may have begun to call this when the work ended: then there is nothing to break off any more.
        if not (ended or watch.cancelled()):
            left = True
            task.cancel()

    watch = asyncio.ensure_future(_client_leaves(receive))
    watch.add_done_callback(break_off)
    try:
        return await work
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        ended = True
        watch.cancel()


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
