"""One connection: what arrives is cut into requests within limits, and handed to the parser one request at a time."""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from http import HTTPStatus
from typing import Any, Final, cast

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from llm_serving.config.sections.server import ServerConfig
from llm_serving.core.timings import monotonic
from llm_serving.server.front_door.body_meter import BodyMeter
from llm_serving.server.front_door.cycle_hooks import close_unless_read, when_digested
from llm_serving.server.front_door.framing import declared_length
from llm_serving.server.front_door.guests import Guests
from llm_serving.server.front_door.joined_head import JoinedHead
from llm_serving.server.front_door.lane import LANE_KEY, Lane
from llm_serving.server.front_door.older_http import OLDER, end_with_connection
from llm_serving.server.front_door.parting import PartingTransport
from llm_serving.server.front_door.refusals import NO_MEMORY, NOT_HTTP, Refusal, RefusedError
from llm_serving.server.front_door.request_head import BLANK_LINE, RequestHead, without_upgrade
from llm_serving.server.front_door.request_target import for_one_host
from llm_serving.server.front_door.slow_reader import SlowReader
from llm_serving.server.front_door.turn_timer import TurnTimer
from llm_serving.server.front_door.turns import Turns

ARRIVED_KEY: Final = "llm_serving.arrived"
"""Of a request's scope: when its head had come, on the clock of `core.clock`, however long it then waited here."""
HELD_KEY: Final = "llm_serving.held"
"""Of a request's scope: to be told how much of its body is held at most, by who puts the rest on a disk."""
UNSENT_KEY: Final = "llm_serving.unsent"
"""Of a request's scope: to be told how many bytes of its answer more, or less, are made and wait to be written."""
UNSENT_STEP_BYTES: Final = 16 * 1024
"""By which they change until that is noted."""
READ_BYTES: Final = 64 * 1024
"""Most bytes that are read of a connection before others get their turn on the event loop."""
SLICE_BYTES: Final = 4 * 1024
"""Most bytes of a chunked body that are parsed before others get their turn on the event loop."""
TLS_BYTES: Final = 128 * 1024
"""What the layer of TLS keeps beside the bytes of a connection that wait."""
WRITE_BUFFER_BYTES: Final = 64 * 1024
"""Bytes written and not taken by the client at which an answer waits."""
PROBES: Final = frozenset(("/health", "/ping"))
"""Answered from what is known at that moment, in less time than it takes to let them wait for another turn."""
BODY_GRACE_S: Final = 5.0
"""Seconds after `body_timeout_s` in which the application may refuse the request in its own words."""


class _Flow(FlowControl):
    """Reading is resumed by whoever wants more of a body, but not while further requests are held back."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class Connection(HttpToolsProtocol):
    """uvicorn's protocol, with limits in front of its parser.

    The parser gets whole heads, and nothing of a request before the answer to the one before it is complete; what
    arrives earlier is held, unparsed. So each connection has one request at most, and whoever leaves is noticed by it.
    A message without a declared length can only end at a blank line, so that pieces are cut there.

    ```
    between requests --first byte--> head --blank line--> body --last byte--> answer --last byte--> between requests
      idle_timeout_s          header_timeout_s       body_timeout_s       write_timeout_s
    ```

    Args:
        config: Loaded; the application and what uvicorn wants to know.
        state: Connections and tasks of the server.
        address: Of the client, as `Guests` counts it.
        guests: Has admitted it, or will.
        limits: Of the configuration.
        head: Their part for heads.
        turns: In which requests begin and go on, and connections end.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        address: str,
        guests: Guests,
        limits: ServerConfig,
        head: RequestHead,
        turns: Turns,
    ) -> None:
        super().__init__(config, state, {})
        self.address = address
        self.weight = 0
        self.welcome: asyncio.Task[None] | None = None
        self.unread_since: float | None = None
        """Its first bytes had come by then and have not been read; None: it had sent none, or they have been."""
        self.descriptor: int | None = None
        """Of its socket, as long as it is open."""
        self._arrived = 0.0
        self._guests = guests
        self._limits = limits
        self._head = head
        self._turns = turns
        self._held = b""
        self._searched = 0
        self._in_body = False
        self._body = BodyMeter()
        self._declared: int | None = None
        """Bytes of the body that the last head told of."""
        self._unsent = self._unsent_noted = 0
        self._is_scheduled = False
        self.has_turn = True
        """Whether what comes next is part of a turn that was waited for: that of its welcome at first."""
        self._undigested: RequestResponseCycle | None = None
        self._timer = TurnTimer(self.loop, turns, address)
        self._reader: SlowReader | None = None
        self._parting: PartingTransport | None = None
        self._lane: Lane | None = None

    # A guest

    @property
    def is_served(self) -> bool:
        return self._is_answered or self._is_unread or (self._parting is not None and self._parting.is_unread)

    @property
    def _is_answered(self) -> bool:
        """Whether the application works on a request that has come to its end."""
        cycle = self.cycle
        return not (self._in_body or cycle is None or cycle.response_complete or self.transport.is_closing())

    @property
    def is_heard(self) -> bool:
        if self.unread_since is not None or self._is_scheduled:
            return False
        return self.descriptor is None or not _num_unread(self.descriptor)  # a busy loop has not come to it yet

    @property
    def is_idle(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete and not (self._in_body or self._held)

    def end(self) -> None:
        if self._parting is not None:
            self._parting.abort()
        elif self.welcome is not None:
            self.welcome.cancel()

    def unburden(self) -> None:
        if self._is_unread:
            self.end()
        else:
            self._refuse(NO_MEMORY)

    @property
    def _is_unread(self) -> bool:
        """Whether an answer waits for the client to take what was written."""
        return self._reader is not None and self._reader.is_watched

    @property
    def _is_receiving(self) -> bool:
        """Whether more of a body is to come, for an answer that is not complete."""
        return self._in_body and not self.cycle.response_complete and not self.transport.is_closing()

    def abandon(self) -> None:
        """It will never be made. What refers to itself would stay until a search for such things: the parser, and the
        welcome through the error that it ended with."""
        self.parser = self.welcome = self.descriptor = None

    # The transport's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.connections.add(self)
        self.scheme = "https" if transport.get_extra_info("sslcontext") else "http"
        self.server = _host_and_port(transport.get_extra_info("sockname"))
        self.client = _host_and_port(transport.get_extra_info("peername"))
        transport.set_write_buffer_limits(WRITE_BUFFER_BYTES)
        self.flow = _Flow(transport)
        self._parting = PartingTransport(
            transport, self.loop, lambda: self._in_body or bool(self._held), self._limits.write_timeout_s
        )
        self.transport = cast(asyncio.Transport, self._parting)
        unsent = transport.get_write_buffer_size
        self._reader = SlowReader(self.loop, unsent, self._limits.write_timeout_s, self._cut)
        self._timer.start(self._limits.header_timeout_s, self._head_is_late)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client has left; a thousand may do so at once."""
        if self.scheme == "https":
            return None  # TLS does not ask
        assert self._parting is not None
        self._turns.do(self.address, self._parting.leave)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        with self._turns.counted():
            self._lose(exc)

    def _lose(self, exc: Exception | None) -> None:
        self._held = b""
        self.descriptor = None
        self._timer.stop()
        if self._reader is not None:
            self._reader.leave()
        self._guests.leave(self)
        super().connection_lost(exc)
        assert self._parting is not None
        self._parting.lost()
        # What refers to itself stays until a search for such things, which holds the event loop.
        self._leave_lane()
        if self.scope is not None:
            self.scope.pop(UNSENT_KEY, None)  # type: ignore[typeddict-item]
        if self.cycle is not None:
            self.cycle.on_response = _nothing
            self.cycle.transport = self.transport
            self.cycle.__dict__.pop("receive", None)
        self.cycle = self._undigested = self._reader = self.welcome = None  # type: ignore[assignment]
        self._in_body = False

    def data_received(self, data: bytes) -> None:
        assert self._parting is not None
        if not (self._in_body or self._is_answered):
            self._arrived = monotonic() if self.unread_since is None else self.unread_since
        self.unread_since = None
        has_time = self._turns.has_time or (self.has_turn and self._turns.take_ride())
        if len(data) >= READ_BYTES:
            self._take_turns()
        if self._parting.is_closing():
            self._parting.drop(len(data))
            self._hold_back()
            return
        self._held = self._held + data if self._held else data
        if has_time:
            with self._turns.counted():
                self._advance()
                self.has_turn = False
        else:
            self.has_turn = False
            self._take_turns()
            self._hold_back()

    def pause_writing(self) -> None:
        super().pause_writing()
        assert self._reader is not None
        assert self._parting is not None
        self._reader.watch()
        self._parting.pause()
        self._weigh()

    def resume_writing(self) -> None:
        if self._reader is not None:
            self._reader.leave()
        super().resume_writing()
        self._weigh()
        assert self._parting is not None
        self._parting.resume()

    # Cutting what arrives

    def _advance(self) -> None:
        """Hands the parser what it may have of the bytes held."""
        while self._held and not self.transport.is_closing() and not self._is_answered:
            before = len(self._held)
            if not self._in_body:
                self._advance_head()
            elif self._body.left is not None:
                self._advance_declared(self._body.left)
            else:
                self._advance_chunked()
                if self._in_body and 0 < len(self._held) < before:
                    self._take_turns()
                    break
            if len(self._held) == before:
                break
        if self._is_receiving and self._undigested is None:
            self._watch_digestion(self.cycle)
        self._hold_back()
        self._weigh()

    def _take_turns(self) -> None:
        """Goes on when others had their turn."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._turns.do_later(self.address, self._go_on)

    def _go_on(self) -> None:
        self._is_scheduled = False
        self.has_turn = True
        self._advance()
        self.has_turn = False

    def _advance_head(self) -> None:
        if self._held[0] in b"\r\n":  # empty lines before a request line mean nothing, and win no time
            self._held = self._held.lstrip(b"\r\n")
            if not self._held:
                return
        size = self._head.size(self._held, self._searched)
        refusal = self._head.refusal(self._held, size or len(self._held))
        if refusal is not None:
            self._refuse(refusal)
            return
        self._searched = 0 if size else len(self._held)
        self._unset_keepalive_if_required()
        if size:
            head, self._held = self._held[:size], self._held[size:]
            self._parse(without_upgrade(head))
        elif not self._timer.is_set:
            self._timer.start(self._limits.header_timeout_s, self._head_is_late)

    def _advance_declared(self, left: int) -> None:
        self._unset_keepalive_if_required()
        piece, self._held = self._held[:left], self._held[left:]
        self._body.left = left - len(piece)
        self._parse(piece)

    def _advance_chunked(self) -> None:
        """A slice at most, up to the end of the message at most."""
        self._unset_keepalive_if_required()
        data, begin = self._held[:SLICE_BYTES], 0
        while self._in_body and not self.transport.is_closing():
            end = data.find(BLANK_LINE, begin) + len(BLANK_LINE)
            if end < len(BLANK_LINE):  # what may begin a blank line waits for its end
                end = len(data) - (2 if data.endswith(BLANK_LINE[:2]) else 1 if data.endswith(BLANK_LINE[:1]) else 0)
            if end <= begin:
                break
            self._parse(data[begin:end])
            begin = end
        self._held = self._held[begin:]

    def _parse(self, piece: bytes) -> None:
        was_head = not self._in_body
        self._body.arrived(len(piece))
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            # CONNECT: what follows belongs to no protocol we speak.
            self.cycle.keep_alive = False
            self._held = b""
        except httptools.HttpParserError as error:
            reason = error.__context__
            self._refuse(reason.refusal if isinstance(reason, RefusedError) else NOT_HTTP)
            return
        if was_head and self._in_body:
            self._body.left = self._declared
            if self._body.left is None or self.expect_100_continue:  # it may take the answer for leave to send no body
                close_unless_read(self.cycle, lambda: self._in_body)
            else:
                self.cycle.keep_alive &= self._body.left <= self._limits.max_request_body_bytes
            self._timer.start(self._limits.body_timeout_s + BODY_GRACE_S, self._body_is_late)
        elif self._in_body and self._body.framing > self._limits.max_header_bytes:
            rule = f"chunk sizes, extensions and trailers must be at most {self._limits.max_header_bytes} bytes"
            self._refuse(Refusal(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, rule))

    def _hold_back(self) -> None:
        """Reads no further while a client is too far ahead of its answers."""
        assert self._parting is not None
        assert isinstance(self.flow, _Flow)
        if self._parting.is_over:
            return
        if self._is_scheduled or (self._is_answered and len(self._held) > self._limits.max_pipelined_bytes):
            self.flow.held = True
            self.flow.pause_reading()
        elif self.flow.held:
            self.flow.held = False
            if not self._is_receiving or len(self.cycle.body) <= HIGH_WATER_LIMIT:  # else the application reads first
                self.flow.resume_reading()

    # The parser's calls

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # trailers are dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._timer.stop()
        self._body.begin()
        self.scope[ARRIVED_KEY] = self._arrived  # type: ignore[typeddict-unknown-key]
        self._unsent = self._unsent_noted = 0
        self.scope[UNSENT_KEY] = self._note_unsent  # type: ignore[typeddict-unknown-key]
        self.scope[HELD_KEY] = self._body.hold_at_most  # type: ignore[typeddict-unknown-key]
        version = self.parser.get_http_version()
        self._declared = declared_length(version, self.headers)  # the parser reports their errors as one of its own
        self.url = for_one_host(version, self.url, self.headers)
        super().on_headers_complete()
        if version == OLDER:
            end_with_connection(self.cycle)
        JoinedHead(self.cycle, self.loop)
        self._lane = Lane(self.cycle, self._turns)
        self.scope[LANE_KEY] = self._lane  # type: ignore[typeddict-unknown-key]
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        self._body.were_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._timer.stop()
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():  # answered before its end
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    # The application's side

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if not (self.has_turn and self.scope["path"] in PROBES):
            app = self._turns.paced(cast(ASGIApp, app), self.address)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if isinstance(self.cycle.transport, JoinedHead):  # to a HEAD, and what is written next belongs to another
            self.cycle.transport.go_on()
        self._leave_lane()
        self._undigested = None
        if self._held:
            self._arrived = monotonic()  # until now it waited for the answer before its own
            self._advance()
        else:
            self._weigh()

    def _leave_lane(self) -> None:
        if self._lane is not None:
            self._lane.end()
            self._lane = None

    def _watch_digestion(self, cycle: RequestResponseCycle) -> None:
        """The bytes of a body weigh until it is digested."""
        self._undigested = cycle

        def digested() -> None:
            if self._undigested is cycle:
                self._undigested = None
                self._weigh()

        when_digested(cycle, digested)

    def _note_unsent(self, num_bytes: int) -> None:
        self._unsent += num_bytes
        if self._is_unread and abs(self._unsent - self._unsent_noted) >= UNSENT_STEP_BYTES:
            self._weigh()

    def _weigh(self) -> None:
        weight = len(self._held)
        if self._undigested is not None:
            weight += self._body.num_held
        if self._is_unread:
            weight += self.transport.get_write_buffer_size() + self._unsent
            self._unsent_noted = self._unsent
        if weight and self.scheme == "https":
            weight += TLS_BYTES
        if weight != self.weight:
            self._guests.weigh(self, weight)

    # Ends

    def timeout_keep_alive_handler(self) -> None:
        idle, close = self.timeout_keep_alive_task, super().timeout_keep_alive_handler

        def act() -> None:
            if self.timeout_keep_alive_task is idle:
                close()

        self._turns.do(self.address, act)

    def _cut(self) -> None:
        self._turns.do(self.address, self.end)

    def _head_is_late(self) -> None:
        if self._held:
            rule = f"the headers must arrive within {self._limits.header_timeout_s:g} seconds"
            self._refuse(Refusal(HTTPStatus.REQUEST_TIMEOUT, rule))
        else:
            self.transport.close()

    def _body_is_late(self) -> None:
        rule = f"the body must arrive within {self._limits.body_timeout_s:g} seconds"
        self._refuse(Refusal(HTTPStatus.REQUEST_TIMEOUT, rule))

    def _refuse(self, refusal: Refusal) -> None:
        """Ends the connection, with an answer where none has begun."""
        cycle = self.cycle
        waits = cycle is not None and not cycle.response_complete
        if waits:
            cycle.disconnected = True
            cycle.message_event.set()
        self._undigested = None
        if waits and cycle.response_started:
            self.end()
        elif not self.transport.is_closing():
            if waits or not self._in_body:  # a request that is answered has no second answer
                self.transport.write(refusal.to_bytes())
                self._guests.on_refused(self.address, refusal.status)
            self.transport.close()
        self._held = b""


def _nothing() -> None:
    """Instead of a call to a connection that has ended."""


def _num_unread(descriptor: int) -> int:
    """Bytes that have come on a socket and that nobody has read."""
    try:
        return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:
        return 0


def _host_and_port(address: object) -> tuple[str, int] | None:
    """Of a socket that takes both kinds of IP an address of the older one is told as it is elsewhere."""
    if not isinstance(address, tuple) or len(address) < 2:
        return None
    host = str(address[0])
    return host.removeprefix("::ffff:") if "." in host else host, int(address[1])
