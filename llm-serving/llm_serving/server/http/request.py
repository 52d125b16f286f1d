"""One request of a connection: its head (RFC 9112), rewritten so that it is unambiguous, and its body."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import httptools
from msgspec import json
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llm_serving.config.sections.server import ServerConfig
from llm_serving.core.timings import monotonic

if TYPE_CHECKING:
    from llm_serving.server.http.connection import Connection

BLANK_LINE: Final = b"\n\r\n"
"""The end of a head's last line, and an empty line."""
AROUND_URL: Final = 32
"""Number of bytes of a request line without its URL: method, spaces, version, CR and LF."""
LENGTH_DIGITS: Final = 20
_REQUEST_LINE: Final = re.compile(rb"[A-Z-]+ [!-~]+ HTTP/1\.[01]\r\n")
"""A valid request line. The parser also accepts lines that a proxy may read differently."""
_UPGRADE: Final = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
"""The header `Upgrade`, which is removed (RFC 9110, 7.8). Java's client always sends it, and it stops the parser."""
_AUTHORITY: Final = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?")
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#]+)", re.IGNORECASE)
REQUEST_KEY: Final = "llm_serving.http_request"
"""Scope key of the connection's `HttpRequest`."""
SLICE_BYTES: Final = 16 * 1024
"""Number of bytes of a chunked body that are parsed before the limit of its framing is checked."""
BODY_PER_FRAMING: Final = 4
"""Minimum bytes of content per byte of framing in a chunked body. Tiny chunks would take much time."""
UNSENT_STEP_BYTES: Final = 16 * 1024

T = TypeVar("T")


@dataclass(frozen=True)
class Refusal:
    """A response that refuses a request before the application sees it, and closes the connection."""

    status: HTTPStatus
    message: str

    def to_bytes(self, retry_after_s: int = 1) -> bytes:
        unavailable = self.status == HTTPStatus.SERVICE_UNAVAILABLE
        kind = "service_unavailable_error" if unavailable else "invalid_request_error"
        body = json.encode({"error": {"message": self.message, "type": kind, "param": None, "code": None}})
        retry = f"retry-after: {retry_after_s}\r\n" if unavailable else ""
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
        )
        return head.encode() + body


TOO_MANY_CONNECTIONS: Final = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections")
TOO_MANY_BYTES: Final = Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "the server holds too many unfinished requests")
NOT_HTTP: Final = Refusal(HTTPStatus.BAD_REQUEST, "this is not a request of HTTP/1.1")
BAD_HOST: Final = Refusal(
    HTTPStatus.BAD_REQUEST, "`Host` must be given once, as a name or an address, with a port or without"
)
BAD_ORIGIN: Final = Refusal(HTTPStatus.BAD_REQUEST, "`Origin` must be given at most once")
BAD_URL: Final = Refusal(HTTPStatus.BAD_REQUEST, "the URL must be a path, or begin with http:// or https://")
BAD_LENGTH: Final = Refusal(HTTPStatus.BAD_REQUEST, "`Content-Length` must have at most 20 digits")
BAD_EXPECT: Final = Refusal(HTTPStatus.EXPECTATION_FAILED, "`Expect` must be 100-continue")
BAD_CODING: Final = Refusal(HTTPStatus.NOT_IMPLEMENTED, "`Transfer-Encoding` must be chunked and nothing else")


class RefusedError(ValueError):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class RequestHead(NamedTuple):
    data: bytes
    """The head for uvicorn: with a path as URL, one `Host`, no `Upgrade`."""
    is_http_1_0: bool
    body_length: int | None
    """None if the body is chunked."""
    expects_continue: bool


def check_limits(data: bytes, size: int, limits: ServerConfig) -> None:
    """Raise RefusedError if the first `size` bytes of `data`, all or part of a head, exceed a limit or are not HTTP."""
    if not 65 <= data[0] <= 90:  # a method is in capital letters
        raise RefusedError(NOT_HTTP)
    max_line = limits.max_url_bytes + AROUND_URL
    line = data.find(b"\n", 0, min(size, max_line))
    if line < 0 and size >= max_line:
        rule = f"the URL must be at most {limits.max_url_bytes} bytes"
        raise RefusedError(Refusal(HTTPStatus.REQUEST_URI_TOO_LONG, rule))
    if line >= 0 and not _REQUEST_LINE.fullmatch(data, 0, line + 1):
        raise RefusedError(NOT_HTTP)
    too_large = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    if data.count(b"\n", 0, size) > limits.max_headers + 2:  # with request line and blank line
        raise RefusedError(Refusal(too_large, f"there must be at most {limits.max_headers} headers"))
    if size > limits.max_header_bytes:
        rule = f"request line and headers must be at most {limits.max_header_bytes} bytes"
        raise RefusedError(Refusal(too_large, rule))


@dataclass(slots=True)
class _Fields:
    url: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    is_complete: bool = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_complete = True


def parse_head(data: bytes) -> RequestHead:
    """Return the checked head of a request. Raise RefusedError if it is not HTTP/1, or is ambiguous."""
    fields, is_valid = _Fields(), True
    parser = httptools.HttpRequestParser(fields)
    try:
        parser.feed_data(_UPGRADE.sub(b"", data) if b"\r\nupgrade:" in data.lower() else data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        is_valid = False
    if not fields.is_complete:
        raise RefusedError(NOT_HTTP)
    is_http_1_0 = parser.get_http_version() == "1.0"
    length: int | None = 0
    expects_continue, hosts, num_origins = False, [], 0
    for name, value in fields.headers:
        if name == b"host":
            hosts.append(value)
        elif name == b"origin":
            num_origins += 1
        elif name == b"content-length":
            if len(value) > LENGTH_DIGITS:
                raise RefusedError(BAD_LENGTH)
            length = int(value)
        elif name == b"transfer-encoding":
            if is_http_1_0:
                raise RefusedError(NOT_HTTP)
            if value.lower() != b"chunked":
                raise RefusedError(BAD_CODING)
            length = None
        elif name == b"expect":
            if value.lower() != b"100-continue":
                raise RefusedError(BAD_EXPECT)
            expects_continue = not is_http_1_0
    if not is_valid:
        raise RefusedError(NOT_HTTP)
    if len(hosts) != 1 and not (is_http_1_0 and not hosts):
        raise RefusedError(BAD_HOST)
    if num_origins > 1:
        raise RefusedError(BAD_ORIGIN)
    url, headers = fields.url, fields.headers
    if (absolute := _ABSOLUTE.match(url)) is not None:  # its host replaces `Host` (RFC 9112, 3.2.2)
        path, hosts = url[absolute.end() :], [absolute[1]]
        url = path if path.startswith(b"/") else b"/" + path
        headers = [(b"host", absolute[1]), *(header for header in headers if header[0] != b"host")]
    elif not url.startswith((b"/", b"*")):
        raise RefusedError(BAD_URL)
    if hosts and not _AUTHORITY.fullmatch(hosts[0]):
        raise RefusedError(BAD_HOST)
    lines = [b"%b %b HTTP/%b" % (parser.get_method(), url, b"1.0" if is_http_1_0 else b"1.1")]
    for name, value in headers:
        if not (is_http_1_0 and name == b"expect"):
            lines.append(b"%b: %b" % (name, value))
    return RequestHead(b"\r\n".join([*lines, b"", b""]), is_http_1_0, length, expects_continue)


@dataclass(slots=True)
class _Chunks:
    pieces: list[bytes] = field(default_factory=list)
    is_complete: bool = False

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = True


class NoRequest:
    in_body = is_started = False
    is_complete = True
    num_held = num_unsent = 0


NO_REQUEST: Final = NoRequest()


class HttpRequest:
    def __init__(self, head: RequestHead, limits: ServerConfig, connection: Connection) -> None:
        self.in_body = head.body_length != 0
        self.is_started = self.is_complete = False
        self._left = head.body_length
        self._limits = limits
        self._connection = connection
        self._is_old = head.is_http_1_0
        self.max_weight = most = limits.max_request_body_bytes
        """Maximum number of body bytes that count as buffered. Routes that write bodies to disk reduce it."""
        self._must_close = head.expects_continue or head.body_length is None or head.body_length > most
        self.arrived = monotonic()
        self.num_unsent = 0
        """Number of response bytes that were produced and not sent."""
        self._num_body = self._num_framing = 0
        self._is_received = self._is_digested = self._is_chunked = False
        if head.body_length is None:
            self._chunks = _Chunks()
            self._parser = httptools.HttpRequestParser(self._chunks)
            self._parser.feed_data(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")

    @property
    def num_held(self) -> int:
        """Number of body bytes that the application has not parsed."""
        return 0 if self._is_digested or self.is_complete else min(self._num_body, self.max_weight)

    def read_body(self, data: bytes) -> tuple[int, bytes]:
        """Return how many bytes of `data` belong to the body, and these bytes for uvicorn, with several chunks joined
        into one. Raise RefusedError if chunks are invalid, or if their sizes and extensions take too many bytes.
        """
        if self._left is None:
            return self._read_chunks(data[:SLICE_BYTES])
        piece = data[: self._left]
        self._left -= len(piece)
        self._num_body += len(piece)
        self.in_body = self._left > 0
        return len(piece), piece

    def _read_chunks(self, data: bytes) -> tuple[int, bytes]:
        """Parse chunks. Return the number of bytes read, and their content as one chunk. The parser gets pieces that
        end at a blank line, because the body ends with one and the parser must not read beyond it.
        """
        num_read, chunks = 0, self._chunks
        try:
            while not chunks.is_complete:
                end = data.find(BLANK_LINE, num_read) + len(BLANK_LINE)
                if end < len(BLANK_LINE):  # bytes that may begin a blank line stay in the buffer until the rest arrives
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
        scope[REQUEST_KEY] = self
        has_body = scope["method"] != "HEAD"
        uvicorn_scope = scope
        if self._is_old and has_body:
            # HTTP/1.0 has no chunks. Because uvicorn would write the body in chunks, its scope names the method HEAD,
            # so it writes only the head. `send_and_record` writes the body.
            scope = {**scope}
            uvicorn_scope["method"] = "HEAD"

        async def receive_and_record() -> Message:
            if self._is_received and not self._is_digested:  # the application waits for the client to disconnect
                self._is_digested = True
                self._connection.update_weight()
            message = await receive()
            self._is_received = not message.get("more_body", False)
            return message

        def send_and_record(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                return self._send_start(send, message, has_chunks=has_body and not self._is_old)
            if self._is_old and has_body:
                self._connection.write(message.get("body", b""))
            return send(message) if message.get("more_body") else self._send_last(send, message)

        try:
            await app(scope, receive_and_record, send_and_record)
        finally:
            if not self.is_started:  # uvicorn responds with an error that has a length
                uvicorn_scope["method"] = scope["method"]

    async def _send_start(self, send: Send, message: Message, *, has_chunks: bool) -> None:
        self.is_started = True
        headers, is_chunked = list(message.get("headers", ())), has_chunks and message["status"] not in (204, 304)
        for name, _ in headers:
            if name.lower() == b"content-length":
                is_chunked = False
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

    def chunk_writer(self, to_bytes: Callable[[int, T], bytes], index: int) -> Callable[[T], bool]:
        """Return a function that writes `to_bytes(index, piece)` to the client as one chunk, without waking the
        application's task. The function returns False if it can write nothing now, because the response is not chunked
        or the client reads too slowly.
        """
        connection = self._connection

        def write(piece: T) -> bool:  # a closure, because it is faster for each token than a method in two partials
            if not (self._is_chunked and connection.can_write):
                return False
            if body := to_bytes(index, piece):
                connection.write(b"%x\r\n%b\r\n" % (len(body), body))
            return True

        return write

    def add_unsent(self, num_bytes: int) -> None:
        before, self.num_unsent = self.num_unsent, self.num_unsent + num_bytes
        if before // UNSENT_STEP_BYTES != self.num_unsent // UNSENT_STEP_BYTES:
            self._connection.update_weight()
