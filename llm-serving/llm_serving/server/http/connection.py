"""One client connection. It enforces limits before uvicorn gets any data."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from llm_serving.config.sections.server import ServerConfig
from llm_serving.server.http.acceptor import ConnectionLimits
from llm_serving.server.http.request import (
    BLANK_LINE,
    NO_REQUEST,
    HttpRequest,
    NoRequest,
    Refusal,
    RefusedError,
    check_limits,
    parse_head,
)
from llm_serving.server.http.tls import TlsRecords

BODY_GRACE_S: Final = 5.0
"""Seconds after `body_timeout_s` in which the application may send its own 408."""
WRITE_BUFFER_BYTES: Final = 64 * 1024
"""Number of unsent bytes at which the application must wait before it sends more."""
PROGRESS_BYTES: Final = 16 * 1024
"""Minimum number of bytes that a client must read in `write_timeout_s`."""
TLS_BYTES: Final = 128 * 1024
"""Estimated memory of TLS in addition to the bytes that a connection buffers."""
LINGER_S: Final = 5.0
LINGER_BYTES: Final = 4 * 2**20
"""Maximum bytes that a refused client may still send in `LINGER_S`, so that it can read the response."""
STARTED_AT_ONCE: Final = 4
PROBES: Final = frozenset(("/health", "/ping"))
_CONNECTION_KEY: Final = "connection"


class Connection(asyncio.Protocol):
    """A client connection, which uvicorn uses as its transport. It passes a request head to uvicorn only when the head
    is complete, in a normalized form, and only after the response to the previous request. So a connection runs at most
    one request at a time. The application in uvicorn's `config` must be wrapped by `within_connection`, so that it
    learns when the client disconnects.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        limits: ServerConfig,
        registry: ConnectionLimits,
        address: str,
        client: socket.socket | None = None,
    ) -> None:
        self.address = address
        self.weight = 0
        self.handshake: asyncio.Task[Any] | None = None
        self.tls: TlsRecords | None = None
        self.has_received = False  # since `tls` has last set it
        self.write: Callable[[bytes], None] = _discard
        self.request: HttpRequest | NoRequest = NO_REQUEST
        self._config, self._state = config, state
        self._limits, self._registry = limits, registry
        self._socket = client
        self._loop = asyncio.get_running_loop()
        self._protocol: Any = None
        self._transport: asyncio.Transport | None = None
        self._held = b""
        self._num_searched = self._num_dropped = 0
        self._is_head_begun = True
        self._is_tls = self._is_closing = self._closes_when_sent = False
        self._app_paused = self._write_paused = self._is_read_paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # State that the registry and the request read

    @property
    def is_busy(self) -> bool:
        """Whether a complete request waits for its response, or the client has not yet read a response."""
        is_running = not self.request.is_complete and not self.request.in_body
        return is_running or self._write_timer is not None

    @property
    def has_unread(self) -> bool:
        try:
            return self._socket is not None and bool(self._socket.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    @property
    def can_write(self) -> bool:
        return not (self._write_paused or self._is_closing)

    # Calls of the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self._is_closing:
            transport.abort()
            return
        self._transport = transport
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        self.write = partial(_write_in_pieces, transport) if self._is_tls else transport.write
        self._protocol = self._config.http_protocol_class(
            config=self._config,  # type: ignore[call-arg]
            server_state=self._state,
            app_state={_CONNECTION_KEY: self},
        )
        self._protocol.connection_made(self)
        self._set_timer(self._limits.header_timeout_s, self._on_head_timeout)

    def data_received(self, data: bytes) -> None:
        self.has_received = True
        if self._is_closing:
            self._num_dropped += len(data)
            if self._num_dropped > LINGER_BYTES:
                self.abort()
            return
        self._held = self._held + data if self._held else data
        self._advance()

    def eof_received(self) -> None:
        self._is_closing = True
        self._held = b""
        self._watch_writing()

    def pause_writing(self) -> None:
        self._write_paused = True
        self._watch_writing()
        self._protocol.pause_writing()
        self.update_weight()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._stop_watching()
        if self._closes_when_sent and self._transport is not None:
            self._transport.close()
        elif self._protocol is not None:
            self._protocol.resume_writing()
            self._loop.call_soon(self._advance)
        self.update_weight()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_closing = True
        self._stop_timer()
        self._stop_watching()
        self._registry.remove(self)
        self._drop_protocol()
        # Break reference cycles: a search of the garbage collector would stall the event loop.
        self._held = b""
        self._transport = self._socket = self.handshake = self.tls = None
        self.request = NO_REQUEST
        self.write = _discard

    def _drop_protocol(self) -> None:
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            protocol.connection_lost(None)

    # Reading

    def _advance(self) -> None:
        try:
            while self._held and not self._is_closing:
                before = len(self._held)
                if self.request.in_body:
                    if not self._app_paused:
                        self._read_body()
                elif self.request.is_complete and not self._write_paused:
                    self._read_head()
                if len(self._held) == before:
                    break
        except RefusedError as error:
            self.refuse(error.refusal)
        self._update_reading()
        self.update_weight()

    def _read_head(self) -> None:
        self._held = self._held.lstrip(b"\r\n")  # empty lines before a request are ignored (RFC 9112, 2.2)
        if not self._held:
            return
        begin = max(0, self._num_searched - len(BLANK_LINE) + 1)
        end = self._held.find(BLANK_LINE, begin) + len(BLANK_LINE)
        is_complete = end >= len(BLANK_LINE)
        check_limits(self._held, end if is_complete else len(self._held), self._limits)
        if is_complete:
            head = parse_head(self._held[:end])
            self._held, self._num_searched, self._is_head_begun = self._held[end:], 0, False
            self.request = HttpRequest(head, self._limits, self)
            self._stop_timer()
            if self.request.in_body:
                self._set_timer(self._limits.body_timeout_s + BODY_GRACE_S, self._on_body_timeout)
            self._protocol.data_received(head.data)
            return
        self._num_searched = len(self._held)
        if not self._is_head_begun:
            self._is_head_begun = True
            self._set_timer(self._limits.header_timeout_s, self._on_head_timeout)

    def _read_body(self) -> None:
        request = self.request
        assert isinstance(request, HttpRequest)
        num_read, data = request.read_body(self._held)
        self._held = self._held[num_read:]
        if not request.in_body:
            self._stop_timer()
            if request.is_complete:
                self._set_timer(self._limits.idle_timeout_s, self.close)
        if data:
            self._protocol.data_received(data)

    def on_response_complete(self) -> None:
        if self._is_closing:
            return
        if not self.request.in_body:
            self._set_timer(self._limits.idle_timeout_s, self.close)
        if self._held:
            self._loop.call_soon(self._advance)
        self.update_weight()

    def _update_reading(self) -> None:
        """Pause reading while the application pauses the body or too many pipelined bytes wait. Otherwise resume."""
        request = self.request
        is_ahead = not request.in_body and len(self._held) > self._limits.max_pipelined_bytes
        waits = not request.is_complete or self._write_paused
        paused = (self._app_paused or is_ahead) and waits and not self._is_closing
        if paused != self._is_read_paused and self._transport is not None and not self._transport.is_closing():
            self._is_read_paused = paused
            source = self.tls or self._transport
            (source.pause_reading if paused else source.resume_reading)()

    def update_weight(self) -> None:
        request = NO_REQUEST if self._is_closing else self.request
        weight = len(self._held) + request.num_held
        if self._write_paused and self._transport is not None:
            weight += self._transport.get_write_buffer_size() + request.num_unsent
        if weight and self._is_tls:
            weight += TLS_BYTES
        if weight != self.weight:
            self._registry.weigh(self, weight)

    # Timeouts and ends

    def _set_timer(self, delay_s: float, call: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(delay_s, call)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_head_timeout(self) -> None:
        if self._held:
            rule = f"the headers must arrive within {self._limits.header_timeout_s:g} seconds"
            self.refuse(Refusal(HTTPStatus.REQUEST_TIMEOUT, rule))
        else:
            self.close()

    def _on_body_timeout(self) -> None:
        rule = f"the body must arrive within {self._limits.body_timeout_s:g} seconds"
        self.refuse(Refusal(HTTPStatus.REQUEST_TIMEOUT, rule))

    def _watch_writing(self) -> None:
        self._stop_watching()
        if self._transport is not None and (size := self._transport.get_write_buffer_size()):
            self._write_timer = self._loop.call_later(self._limits.write_timeout_s, self._check_writing, size)

    def _stop_watching(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _check_writing(self, before: int) -> None:
        if self._transport is not None and 0 < self._transport.get_write_buffer_size() <= before - PROGRESS_BYTES:
            self._watch_writing()
        else:
            self.abort()

    def refuse(self, refusal: Refusal) -> None:
        """Send an error response and close. If a response has begun or cannot be sent, abort the connection."""
        request = self.request
        is_started = request.is_started and not request.is_complete
        if self._transport is None or not self.can_write or is_started:
            self.abort()
            return
        if not (request.is_complete and request.in_body):
            self._transport.write(refusal.to_bytes(self._registry.retry_after_s()))
            self._registry.on_refused(self.address, refusal.status)
        self.close()
        self._drop_protocol()

    def abort(self) -> None:
        self._is_closing = True
        if self._transport is not None:
            self._transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()

    # The transport as uvicorn sees it

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the transport. The address ::ffff:1.2.3.4 of an IPv6 socket becomes 1.2.3.4."""
        if name == "socket" or self._transport is None:
            return default
        value = self._transport.get_extra_info(name, default)
        if name in ("peername", "sockname") and isinstance(value, tuple):
            host = str(value[0])
            return host.removeprefix("::ffff:") if "." in host else host, value[1]
        return value

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        """Stop passing on the body, because uvicorn's buffer is full."""
        self._app_paused = True
        self._update_reading()

    def resume_reading(self) -> None:
        """Pass on the body again, from the next event loop iteration on: uvicorn takes no data during this call."""
        self._app_paused = False
        self._loop.call_soon(self._advance)

    def close(self) -> None:
        """Close once all is sent. If the client still sends, wait up to `LINGER_S`, so that it reads the response."""
        if self._is_closing or self._transport is None:
            return
        self._is_closing = True
        is_sending = self.request.in_body or bool(self._held)
        self._held = b""
        self._stop_timer()
        self.update_weight()
        self._update_reading()
        if is_sending and self._transport.can_write_eof():
            self._transport.write_eof()
            self._set_timer(LINGER_S, self._end_lingering)
            return
        self._closes_when_sent = self._is_tls and self._write_paused
        self._watch_writing()
        if not self._closes_when_sent:
            self._transport.close()

    def _end_lingering(self) -> None:
        if self._transport is not None and self._transport.get_write_buffer_size():
            self._watch_writing()
        else:
            self.abort()


def _write_in_pieces(transport: asyncio.Transport, data: bytes) -> None:
    """Write through TLS in pieces. A single write would be buffered as a whole before `pause_writing` is called."""
    for begin in range(0, len(data), WRITE_BUFFER_BYTES):
        transport.write(data[begin : begin + WRITE_BUFFER_BYTES])


def _discard(data: bytes) -> None: ...


class StartPacer:
    """Starts few requests in each iteration of the event loop, so that many requests do not delay a health probe."""

    def __init__(self) -> None:
        self._num_started = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        if self._num_started == 0:
            loop.call_soon(self._begin_iteration)
        self._num_started += 1
        if self._num_started > STARTED_AT_ONCE:
            waiter = loop.create_future()
            self._waiting.append(waiter)
            await waiter

    def _begin_iteration(self) -> None:
        self._num_started = 0
        while self._waiting and self._num_started < STARTED_AT_ONCE:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._num_started += 1
                waiter.set_result(None)
        if self._num_started:
            asyncio.get_running_loop().call_soon(self._begin_iteration)


def within_connection(app: ASGIApp) -> ASGIApp:
    pacer = StartPacer()

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["state"].pop(_CONNECTION_KEY)
        request = connection.request
        if scope["path"] not in PROBES:
            await pacer.wait()
        if isinstance(request, HttpRequest) and request is connection.request:  # the client is still connected
            await request.run(app, scope, receive, send)

    return run
