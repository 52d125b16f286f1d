"""One request of a connection: where its body ends, and how far the application is with its response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, TypeVar

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llm_serving.config.sections.server import ServerConfig
from llm_serving.core.timings import monotonic
from llm_serving.server.http.request_head import BLANK_LINE, NOT_HTTP, Refusal, RefusedError, RequestHead

if TYPE_CHECKING:
    from llm_serving.server.http.connection import Connection

ARRIVED_KEY: Final = "llm_serving.arrived"
"""Scope: the time at which the head of the request had arrived, by `core.clock`."""
MAX_WEIGHT_KEY: Final = "llm_serving.max_weight"
"""Scope: a function by which the application limits the bytes of the body that count as held in memory."""
UNSENT_KEY: Final = "llm_serving.unsent"
"""Scope: a function that adds to the bytes of the response that are produced and not yet sent."""
WRITE_KEY: Final = "llm_serving.write"
"""Scope: `HttpRequest.write_chunk`."""
SLICE_BYTES: Final = 16 * 1024
"""Bytes of a chunked body that are parsed before the limit of its framing is checked."""
BODY_PER_FRAMING: Final = 4
"""Bytes of a chunked body that pay for one byte of framing: tiny chunks cost much time."""
UNSENT_STEP_BYTES: Final = 16 * 1024

T = TypeVar("T")


class _Chunks:
    """Receives the content of a chunked body from the parser."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.is_complete = False

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True


class HttpRequest:
    """A request that uvicorn has got.

    Args:
        head: Its head.
        limits: Section `serving_config`.
        connection: Its connection.
    """

    def __init__(self, head: RequestHead, limits: ServerConfig, connection: Connection) -> None:
        self.in_body = head.body_length != 0
        """Whether more of the body is to come."""
        self.is_started = self.is_complete = False
        """Whether the response has begun, and whether it is complete."""
        self._left = head.body_length
        self._limits = limits
        self._connection = connection
        self._is_old = head.is_http_1_0
        most = self._max_weight = limits.max_request_body_bytes
        self._must_close = head.expects_continue or head.body_length is None or head.body_length > most
        self._arrived = monotonic()
        self._num_body = self._num_framing = self._num_unsent = 0
        self._is_received = self._is_digested = self._is_chunked = False
        self._chunks = _Chunks()
        if head.body_length is None:
            self._parser = httptools.HttpRequestParser(self._chunks)
            self._parser.feed_data(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")

    @property
    def num_held(self) -> int:
        """Bytes of the body that the application has not parsed yet."""
        return 0 if self._is_digested or self.is_complete else min(self._num_body, self._max_weight)

    @property
    def num_unsent(self) -> int:
        """Bytes of the response that are produced and wait to be sent."""
        return self._num_unsent

    def read_body(self, data: bytes) -> tuple[int, bytes]:
        """Read a piece of the body.

        Returns:
            How many bytes of `data` were read, and what uvicorn gets of them: of chunks their content alone, without
            extensions and trailers.

        Raises:
            RefusedError: The chunks are not valid, or too small.
        """
        if self._left is None:
            return self._read_chunks(data[:SLICE_BYTES])
        piece = data[: self._left]
        self._left -= len(piece)
        self._num_body += len(piece)
        self.in_body = self._left > 0
        return len(piece), piece

    def _read_chunks(self, data: bytes) -> tuple[int, bytes]:
        """Read up to the end of the body at most, which can only be at a blank line."""
        num_read, chunks = 0, self._chunks
        try:
            while not chunks.is_complete:
                end = data.find(BLANK_LINE, num_read) + len(BLANK_LINE)
                if end < len(BLANK_LINE):  # what may begin a blank line waits for its end
                    end = len(data) - (2 if data.endswith(BLANK_LINE[:2]) else data.endswith(BLANK_LINE[:1]))
                if end <= num_read:
                    break
                self._parser.feed_data(data[num_read:end])
                num_read = end
        except httptools.HttpParserError:
            raise RefusedError(NOT_HTTP) from None
        body = b"".join(chunks.pieces)
        chunks.pieces.clear()
        self._num_body += len(body)
        self._num_framing += num_read - len(body)
        if self._num_framing - self._num_body // BODY_PER_FRAMING > self._limits.max_header_bytes:
            rule = f"chunk sizes, extensions and trailers must be at most {self._limits.max_header_bytes} bytes"
            raise RefusedError(Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, rule))
        self.in_body = not chunks.is_complete
        framed = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return num_read, framed + (b"0\r\n\r\n" if chunks.is_complete else b"")

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, and note how far it is."""
        scope[ARRIVED_KEY] = self._arrived
        scope[MAX_WEIGHT_KEY] = self._set_max_weight
        scope[UNSENT_KEY] = self._add_unsent
        scope[WRITE_KEY] = self.write_chunk
        has_chunks = not self._is_old and scope["method"] != "HEAD"

        async def receive_and_note() -> Message:
            if self._is_received and not self._is_digested:  # the application asks whether the client has left
                self._is_digested = True
                self._connection.update_weight()
            message = await receive()
            self._is_received = not message.get("more_body", False)
            return message

        def send_and_note(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                return self._send_start(send, message, has_chunks=has_chunks)
            return send(message) if message.get("more_body") else self._send_last(send, message)

        await app(scope, receive_and_note, send_and_note)

    async def _send_start(self, send: Send, message: Message, *, has_chunks: bool) -> None:
        self.is_started = True
        headers = list(message.get("headers", ()))
        has_length = any(name.lower() == b"content-length" for name, _ in headers)
        is_chunked = has_chunks and not has_length and message["status"] not in (204, 304)
        if is_chunked:
            headers.append((b"transfer-encoding", b"chunked"))
        if self.in_body and self._must_close:  # its client may not send the rest of the body
            headers.append((b"connection", b"close"))
        await send({**message, "headers": headers})
        self._is_chunked = is_chunked

    async def _send_last(self, send: Send, message: Message) -> None:
        self._is_chunked = False
        await send(message)
        self.is_complete = True
        self._connection.on_response_complete()

    def write_chunk(self, to_bytes: Callable[[int, T], bytes], index: int, piece: T) -> bool:
        """Write a piece of a streamed response at once, unless the client reads too slowly.

        A piece that is sent through the application wakes a task, which costs more than the piece.

        Returns:
            False: nothing has been done, not even `to_bytes`.
        """
        if not (self._is_chunked and self._connection.can_write):
            return False
        body = to_bytes(index, piece)
        if body:
            self._connection.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def _set_max_weight(self, num_bytes: int) -> None:
        self._max_weight = num_bytes

    def _add_unsent(self, num_bytes: int) -> None:
        before, self._num_unsent = self._num_unsent, self._num_unsent + num_bytes
        if before // UNSENT_STEP_BYTES != self._num_unsent // UNSENT_STEP_BYTES:
            self._connection.update_weight()
