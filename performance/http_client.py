"""A small HTTP/1.1 client for load generation: one request per connection, every piece of the body stamped on arrival.

A load generator shares its cores with the server it measures. Nothing is decoded while a stream runs: a piece costs one
call of `data_received`, and no task is woken before the response is complete.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import urlsplit

from http_response import HttpError, ResponseParser

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
    """Sends one request and resolves `response` with what comes back."""

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
        self._last_heard_s = self._loop.time()
        self._timer = self._loop.call_later(self._idle_timeout_s, self._check_idle)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._last_heard_s = self._loop.time()
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
        """Re-arms itself instead of being moved at every piece, which would cost more than the piece."""
        left = self._last_heard_s + self._idle_timeout_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_idle)
        else:
            self._fail(HttpError(f"nothing heard from the server for {self._idle_timeout_s:g} s"))

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
        idle_timeout_s: Seconds without a byte from the server after which a request fails; also to connect.
    """

    host: str
    port: int
    idle_timeout_s: float = 600.0

    @classmethod
    def from_url(cls, url: str, idle_timeout_s: float = 600.0) -> "HttpClient":
        """Reads `http://host:port`.

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
        """Sends one request and returns when the response is complete. Cancelling it closes the connection.

        `headers` come beside those that every request has.

        Raises:
            HttpError: The exchange did not end with a complete response.
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
