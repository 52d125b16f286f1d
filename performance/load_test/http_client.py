"""An HTTP/1.1 client for load generation: one request per connection, every part of the body stamped on arrival.

A load generator shares its cores with the server that it measures. So nothing is decoded while a stream runs: a part
costs one call of `data_received`, and no task wakes up before the response is complete. It needs
no package, so the load test runs with any Python.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import urlsplit


class HttpError(Exception):
    """The request failed below HTTP: no connection, a broken or silent one, or bytes that are not HTTP/1.1."""


class ResponseParser:
    """Incremental parser of one HTTP/1.1 response with a chunked, a counted or a connection-terminated body."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self._buffer = bytearray()
        self._body = bytearray()
        self._remaining = 0
        self._read: Callable[[], bool] = self._read_head

    def feed(self, data: bytes) -> bytes:
        """Parse received bytes and return the body bytes that they complete.

        Raises:
            HttpError: The bytes are not an HTTP/1.1 response.
        """
        self._buffer += data
        while not self.complete and self._read():
            pass
        body = bytes(self._body)
        self._body.clear()
        return body

    def feed_eof(self) -> None:
        """Parse the end of the connection.

        Raises:
            HttpError: The response was not complete.
        """
        if self._read == self._read_until_close:
            self.complete = True
        elif not self.complete:
            where = "inside the body" if self.status else "before the response"
            raise HttpError(f"the server closed the connection {where}")

    def _take_line(self) -> bytes | None:
        end = self._buffer.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._buffer[:end]).rstrip(b"\r")
        del self._buffer[: end + 1]
        return line

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        status_line, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        version, _, rest = status_line.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise HttpError(f"not an HTTP/1.1 response: {status_line[:80]!r}")
        if rest[0] == "1":  # an interim response; the real one follows
            return True
        self.status = int(rest[:3])
        for line in lines:
            name, _, value = line.partition(":")
            self.headers[name.strip().lower()] = value.strip()
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._read = self._read_chunk_size
        elif "content-length" in self.headers:
            self._remaining = _length(self.headers["content-length"], 10)
            self._read = self._read_counted
        else:
            self._read = self._read_until_close
        return True

    def _read_chunk_size(self) -> bool:
        line = self._take_line()
        if line is None:
            return False
        self._remaining = _length(line.partition(b";")[0].decode("latin-1"), 16)
        self._read = self._read_chunk if self._remaining else self._read_trailer
        return True

    def _read_chunk(self) -> bool:
        if not self._take_body():
            return False
        self._read = self._read_chunk_end
        return True

    def _read_chunk_end(self) -> bool:
        if self._take_line() is None:
            return False
        self._read = self._read_chunk_size
        return True

    def _read_trailer(self) -> bool:
        line = self._take_line()
        self.complete = line == b""
        return line is not None

    def _read_counted(self) -> bool:
        self.complete = self._take_body()
        return False

    def _read_until_close(self) -> bool:
        self._body += self._buffer
        self._buffer.clear()
        return False

    def _take_body(self) -> bool:
        """Move received bytes of the `_remaining` ones to the body; return True once all of them have been received."""
        data = self._buffer[: self._remaining]
        del self._buffer[: len(data)]
        self._body += data
        self._remaining -= len(data)
        return self._remaining == 0


def _length(text: str, base: int) -> int:
    try:
        length = int(text, base)
    except ValueError:
        length = -1
    if length < 0:
        raise HttpError(f"not a length: {text[:80]!r}")
    return length


NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class TimedPiece:
    """Body bytes that arrived together, and when (`time.perf_counter`, seconds)."""

    time_s: float
    data: bytes


@dataclass(frozen=True)
class HttpResponse:
    """A complete response; header names are lower case."""

    status: int
    headers: dict[str, str]
    pieces: tuple[TimedPiece, ...]

    @property
    def body(self) -> bytes:
        return b"".join(piece.data for piece in self.pieces)


class Exchange(asyncio.Protocol):
    """One request and its response, which resolves `response`."""

    def __init__(self, request: bytes, idle_timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.response: asyncio.Future[HttpResponse] = self._loop.create_future()
        self._request = request
        self._idle_timeout_s = idle_timeout_s
        self._parser = ResponseParser()
        self._pieces: list[TimedPiece] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._last_received_s = self._loop.time()
        self._timer = self._loop.call_later(self._idle_timeout_s, self._check_idle)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._last_received_s = self._loop.time()
        try:
            body = self._parser.feed(data)
        except HttpError as error:
            self._fail(error)
            return
        if body:
            self._pieces.append(TimedPiece(now, body))
        if self._parser.complete:
            self._succeed()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        if self.response.done():
            return
        if exc is not None:
            self._fail(HttpError(f"the connection broke: {exc}"))
            return
        try:
            self._parser.feed_eof()
        except HttpError as error:
            self._fail(error)
        else:
            self._succeed()

    def _check_idle(self) -> None:
        """Fail a silent request. The timer re-arms itself, because moving it at every part would cost more."""
        left = self._last_received_s + self._idle_timeout_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_idle)
        else:
            self._fail(HttpError(f"no data from the server for {self._idle_timeout_s:g} s"))

    def _succeed(self) -> None:
        if not self.response.done():
            self.response.set_result(HttpResponse(self._parser.status, self._parser.headers, tuple(self._pieces)))
        self.close()

    def _fail(self, error: HttpError) -> None:
        if not self.response.done():
            self.response.set_exception(error)
        self.close()

    def close(self) -> None:
        self._timer.cancel()
        self._transport.close()


@dataclass(frozen=True)
class HttpClient:
    """Requests to one server.

    Attributes:
        idle_timeout_s: Seconds without a byte from the server after which a request fails; also the limit to connect.
    """

    host: str
    port: int
    idle_timeout_s: float = 600.0

    @classmethod
    def from_url(cls, url: str, idle_timeout_s: float = 600.0) -> HttpClient:
        """Parse `http://host:port`.

        Raises:
            ValueError: Another scheme, a path, or no host.
        """
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            raise ValueError(f"`--url` must look like http://host:port. Given: {url}")
        return cls(parts.hostname, parts.port or 80, idle_timeout_s)

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
    ) -> HttpResponse:
        """Send one request and return its complete response. Cancelling it closes the connection.

        `headers` are added to those that every request has.

        Raises:
            HttpError: The response is not complete.
        """
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            + "\r\n"
        )
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.idle_timeout_s):
                _, exchange = await loop.create_connection(
                    lambda: Exchange(head.encode("latin-1") + body, self.idle_timeout_s), self.host, self.port
                )
        except ConnectionRefusedError as error:
            raise HttpError(f"connection refused: nothing listens at {self.host}:{self.port}") from error
        except OSError as error:  # TimeoutError is one
            reason = error.strerror or str(error) or f"no connection within {self.idle_timeout_s:g} s"
            raise HttpError(f"cannot connect to {self.host}:{self.port}: {reason}") from error
        try:
            return await exchange.response
        finally:
            exchange.close()
