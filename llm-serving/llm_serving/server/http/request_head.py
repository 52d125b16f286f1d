"""Check and rewrite the head of a request (RFC 9112), so that this server and a proxy see the same request."""

from __future__ import annotations

import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final, NamedTuple

import httptools
from msgspec import json

from llm_serving.config.sections.server import ServerConfig

BLANK_LINE: Final = b"\n\r\n"
"""The end of a head: the end of its last line and an empty line."""
AROUND_URL: Final = 32
"""Bytes of a request line besides its URL: method, spaces, version, CR and LF."""
LENGTH_DIGITS: Final = 20
_REQUEST_LINE: Final = re.compile(rb"[A-Z-]+ [!-~]+ HTTP/1\.[01]\r\n")
"""The parser accepts more, in which a proxy may see another version or URL."""
_UPGRADE: Final = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)
"""Ignored (RFC 9110, 7.8). Java's client asks for HTTP/2 in every request, and the parser would stop at the body."""
_AUTHORITY: Final = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?")
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Refusal:
    """The response to bytes that never become a request; it closes the connection."""

    status: HTTPStatus
    message: str

    def to_bytes(self, retry_after_s: int = 1) -> bytes:
        """Return the response, with an error body as in the OpenAI API."""
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
BAD_URL: Final = Refusal(HTTPStatus.BAD_REQUEST, "the URL must be a path, or begin with http:// or https://")
BAD_LENGTH: Final = Refusal(HTTPStatus.BAD_REQUEST, "`Content-Length` must have at most 20 digits")
BAD_EXPECT: Final = Refusal(HTTPStatus.EXPECTATION_FAILED, "`Expect` must be 100-continue")
BAD_CODING: Final = Refusal(HTTPStatus.NOT_IMPLEMENTED, "`Transfer-Encoding` must be chunked and nothing else")


class RefusedError(ValueError):
    """The request breaks a rule."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class RequestHead(NamedTuple):
    """A checked head."""

    data: bytes
    """The head as uvicorn gets it: with a path as URL, one `Host`, no `Upgrade`."""
    is_http_1_0: bool
    body_length: int | None
    """None: the body is chunked."""
    expects_continue: bool


def check_limits(data: bytes, size: int, limits: ServerConfig) -> None:
    """Raise RefusedError if the first `size` bytes, a head or its beginning, exceed a limit or begin no request."""
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


class _Fields:
    """Receives the parts of a head from the parser."""

    def __init__(self) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_complete = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.is_complete = True


def parse_head(data: bytes) -> RequestHead:
    """Return the checked head of a request.

    Raises:
        RefusedError: The head is not HTTP/1, or another reader could find another host or another end of the body.
    """
    fields, is_valid = _Fields(), True
    parser = httptools.HttpRequestParser(fields)
    try:
        parser.feed_data(_UPGRADE.sub(b"", data) if b"\r\nupgrade:" in data.lower() else data)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        is_valid = False
    if not fields.is_complete:
        raise RefusedError(NOT_HTTP)
    is_http_1_0 = parser.get_http_version() == "1.0"
    length, expects_continue = _framing(fields.headers, is_http_1_0=is_http_1_0)
    if not is_valid:
        raise RefusedError(NOT_HTTP)
    url, headers = _for_one_host(fields.url, fields.headers, is_http_1_0=is_http_1_0)
    lines = [b"%b %b HTTP/%b" % (parser.get_method(), url, b"1.0" if is_http_1_0 else b"1.1")]
    lines += [b"%b: %b" % header for header in headers if not (is_http_1_0 and header[0] == b"expect")]
    return RequestHead(b"\r\n".join([*lines, b"", b""]), is_http_1_0, length, expects_continue and not is_http_1_0)


def _framing(headers: list[tuple[bytes, bytes]], *, is_http_1_0: bool) -> tuple[int | None, bool]:
    """Return the length of the body (None: chunked), and whether the client waits for `100 Continue`."""
    length: int | None = 0
    expects_continue = False
    for name, value in headers:
        if name == b"content-length":
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
            expects_continue = True
    return length, expects_continue


def _for_one_host(
    url: bytes, headers: list[tuple[bytes, bytes]], *, is_http_1_0: bool
) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """Return path and headers. A host in the URL replaces `Host` (RFC 9112, 3.2.2)."""
    num_hosts = sum(name == b"host" for name, _ in headers)
    if num_hosts != 1 and not (is_http_1_0 and num_hosts == 0):
        raise RefusedError(BAD_HOST)
    if (absolute := _ABSOLUTE.match(url)) is not None:
        url = url[absolute.end() :]
        url = url if url.startswith(b"/") else b"/" + url
        headers = [(b"host", absolute[1]), *(header for header in headers if header[0] != b"host")]
    elif not url.startswith((b"/", b"*")):
        raise RefusedError(BAD_URL)
    if any(name == b"host" and not _AUTHORITY.fullmatch(value) for name, value in headers):
        raise RefusedError(BAD_HOST)
    return url, headers
