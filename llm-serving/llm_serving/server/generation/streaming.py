"""Streamed responses as server-sent events. If the client may resume the stream, each event has an id."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from llm_serving.core.request_output import RequestOutput
from llm_serving.errors import LLMServingError, WorkerError
from llm_serving.log import get_logger
from llm_serving.server.generation.generation import ClientGoneError, Generation, run_until_client_leaves
from llm_serving.server.http.request import REQUEST_KEY, HttpRequest
from llm_serving.server.idempotency.request import END, Position

logger = get_logger(__name__)

EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
STREAM_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Response headers with which proxies neither store nor buffer the response."""
DONE: Final = b"data: [DONE]\n\n"
_encode: Final = msgspec.json.Encoder().encode
_BLANK: Final = b"\n\n"


def event(content: object) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"


def named_event(name: str, content: object) -> bytes:
    return b"event: " + name.encode() + b"\n" + event(content)


class TextEvents:
    """Encodes events whose JSON object, `content_of(text)`, differs only in the text. All the rest is encoded once."""

    __slots__ = ("_after", "_before")

    def __init__(self, content_of: Callable[[str], object]) -> None:
        empty, other = event(content_of("")), event(content_of("x"))  # equal up to the opening quotation mark
        begin = next(i for i, (ours, theirs) in enumerate(zip(empty, other, strict=False)) if ours != theirs) - 1
        self._before, self._after = empty[:begin], empty[begin + 2 :]

    def event(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after


class Chunks(Protocol):
    def chunk(self, index: int, output: RequestOutput) -> bytes:
        """Return the bytes to send for an output, perhaps none. Raise LLMServingError if the generation failed."""

    async def finish(self) -> bytes: ...


class NumberedPieces:
    """Adds an id to each server-sent event. Omits the events up to `position`, which the client has already read."""

    def __init__(self, pieces: Chunks, stream_id: str, num_choices: int, position: Position) -> None:
        assert len(position.num_read) in (0, num_choices)
        self._pieces = pieces
        self._prefix = f"id: {stream_id}:"
        self._num_read = list(position.num_read or (0,) * num_choices)
        self._num_closing_read = position.num_closing
        self._num_made = [0] * num_choices
        self._num_sent = self._num_read.copy()

    def chunk(self, index: int, output: RequestOutput) -> bytes:
        events = self._pieces.chunk(index, output)
        if not events:
            return events
        numbered = []
        for event in events.split(_BLANK)[:-1]:
            self._num_made[index] += 1
            if self._num_made[index] > self._num_read[index]:
                self._num_sent[index] = self._num_made[index]
                numbered.append(self._with_id(event, ""))
        return b"".join(numbered)

    async def finish(self) -> bytes:
        events = (await self._pieces.finish()).split(_BLANK)[:-1]
        numbered = []
        for number, event in enumerate(events, start=1):
            if number > self._num_closing_read:
                is_last = event + _BLANK == DONE
                numbered.append(self._with_id(event, f"+{END}" if is_last else f"+{number}"))
        return b"".join(numbered)

    def _with_id(self, event: bytes, closing: str) -> bytes:
        counts = ".".join(map(str, self._num_sent))
        return f"{self._prefix}{counts}{closing}\n".encode() + event + _BLANK


class StreamResponse(Response):
    """Sends each output as it arrives, and closes the generation at the end or when the client disconnects. If the
    generation fails, the status has already been sent, so `error_chunk` formats the error as the last chunk.
    """

    def __init__(
        self,
        generation: Generation,
        chunks: Chunks,
        error_chunk: Callable[[LLMServingError], bytes],
        *,
        media_type: str = EVENT_STREAM,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._generation = generation
        self._chunks = chunks
        self._error_chunk = error_chunk
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.init_headers({**STREAM_HEADERS, **generation.headers, **(headers or {})})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http_request: HttpRequest | None = scope.get(REQUEST_KEY)
        if http_request is not None:
            self._generation.report_unread_bytes(http_request.add_unsent)
            self._generation.set_fast_path(http_request.chunk_writer(self._chunks.chunk, 0))
        try:
            with contextlib.suppress(ClientGoneError):
                await run_until_client_leaves(receive, self._send_all(send))
        finally:
            # Both refer to objects that refer to the generation: break the cycle.
            self._generation.report_unread_bytes(None)
            self._generation.set_fast_path(None)
            await self._generation.aclose()

    async def _send_all(self, send: Callable[[Message], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        to_bytes, last = self._chunks.chunk, b""
        num_left = len(self._generation.streams)
        try:
            async for index, output in self._generation.outputs():
                chunk = to_bytes(index, output)
                num_left -= output.finished
                if num_left == 0:
                    last = chunk  # each write wakes the client: send the last chunk together with the end
                elif chunk:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            last += await self._chunks.finish()
        except LLMServingError as error:
            last += self._error_chunk(error)
        except Exception:
            logger.exception(
                "The response stream failed; the client gets an internal error. request_id=%s",
                self._generation.streams[0].request_id,
            )
            last += self._error_chunk(internal_error())
        await send({"type": "http.response.body", "body": last, "more_body": False})


def internal_error() -> LLMServingError:
    """Return the error that a client gets for a defect of the server. The log has the details."""
    return WorkerError("internal error")
