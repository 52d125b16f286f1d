"""Accounts for every HTTP request: its timings, a count for /metrics, and one line of JSON in the access log.

A line has client, route, times and sizes, never a text. `LineBudget` bounds how many lines of a kind a log gets.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llm_serving.config.sections.server import ServerConfig
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.timings import Clock, HttpTimings
from llm_serving.errors import ConfigError
from llm_serving.log import LogWriter, RotatingFile, get_logger
from llm_serving.observability.metrics import HttpMetrics
from llm_serving.server.http.request import ARRIVED_KEY
from llm_serving.server.middleware.tracing import HEADER, Tracer, context_of
from llm_serving.server.request_context import CONTEXT_KEY, RequestContext

logger = get_logger(__name__)
STANDARD_OUTPUT: Final = Path("-")
REFUSED_BURST, REFUSED_PER_SECOND = 200, 20.0
"""Lines of refusals (4xx, 503): a flood of them must not push the others out of the files."""
_encode: Final = msgspec.json.Encoder().encode
OTHER: Final = "other"
"""Route and method of what the server does not know."""
METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
PROBES: Final = frozenset(("/health", "/ping", "/metrics"))
"""Asked again and again by machines: counted, and lines only where something is wrong."""
CLIENT_LEFT: Final = 499
MAX_ADDRESS_CHARS: Final = 64
REFUSED_LOG_BURST, REFUSED_LOG_LINES_PER_SECOND = 10, 0.2
"""Lines in the server's log for requests that were refused or failed; /metrics counts all of them."""


class LineBudget:
    """Lets `burst` lines pass at once and `per_second` in the long run, and counts the others.

    It has no clock: times are given, in seconds, and never go back.
    """

    def __init__(self, burst: int, per_second: float) -> None:
        self._burst = float(burst)
        self._per_second = per_second
        self._left = float(burst)
        self._since = 0.0
        self._num_suppressed = 0

    def take(self, now: float) -> int | None:
        """How many lines were kept back since the last that passed; None: this one is kept back too."""
        self._left = min(self._burst, self._left + (now - self._since) * self._per_second)
        self._since = now
        if self._left < 1.0:
            self._num_suppressed += 1
            return None
        self._left -= 1.0
        suppressed, self._num_suppressed = self._num_suppressed, 0
        return suppressed


class AccessLine(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A line; what does not apply is left out. Times are milliseconds from the request's headers, unless stated."""

    time: str
    """When the answer ended, in UTC."""
    client: str
    method: str
    route: str
    status: int
    total_ms: float
    """To the end of the answer."""
    id: str | None = None
    """What `/v1/requests/{id}/explain` takes."""
    tenant: str | None = None
    request_class: str | None = msgspec.field(default=None, name="class")
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache."""
    output_tokens: int | None = None
    """Generated, of all choices."""
    finish: str | None = None
    """Why the answer ended; several reasons with a comma between them; `abort`: the client left."""
    queue_ms: float | None = None
    """From arrival at the engine to being scheduled for the first time."""
    ttft_ms: float | None = None
    """To the first token."""
    error: str | None = None
    suppressed: int | None = None
    """Lines of refusals that were left out since the one before."""


class AccessLog:
    """Writes a line for every request; of refusals at most so many a second.

    Args:
        put: Takes a line; must not wait.
        wall_clock: The time of day.
        reopen: Has further lines go to a file that is opened anew.
    """

    def __init__(
        self,
        put: Callable[[str], None],
        wall_clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        reopen: Callable[[], None] = lambda: None,
    ) -> None:
        self._put = put
        self.reopen = reopen
        self._wall_clock = wall_clock
        self._refusals = LineBudget(REFUSED_BURST, REFUSED_PER_SECOND)

    def write(self, note: RequestContext, status: int, now: float) -> None:
        """Writes the line of a request that was answered with `status` at `now`, on the engine's clock."""
        suppressed: int | None = 0
        if 400 <= status < 499 or status == HTTPStatus.SERVICE_UNAVAILABLE:
            suppressed = self._refusals.take(now)
            if suppressed is None:
                return
        began = note.http_timings.received_time
        line = AccessLine(
            time=self._wall_clock().isoformat(timespec="milliseconds"),
            client=note.client,
            method=note.method,
            route=note.route,
            status=status,
            total_ms=_ms(now - began),
            id=note.request_id or None,
            tenant=note.tenant or None,
            request_class=note.request_class or None,
            error=note.error or None,
            suppressed=suppressed or None,
        )
        if note.outputs is not None:
            _add_usage(line, note, note.outputs)
            first = note.http_timings.first_token_time
            line.ttft_ms = None if first is None else _ms(first - began)
        self._put(_encode(line).decode())


def open_access_log(serving: ServerConfig) -> tuple[AccessLog | None, Callable[[], None]]:
    """The access log of a configuration, if it has one, and what closes it.

    Raises:
        ConfigError: The file cannot be opened.
    """
    path = serving.access_log
    if path is None:
        return None, lambda: None
    handler: logging.Handler
    if path == STANDARD_OUTPUT:
        handler = _StandardOutput(sys.stdout)
    else:
        try:
            handler = RotatingFile(path, serving.log_file_bytes, serving.log_files)
        except OSError as error:
            rule = f"cannot be written: {error.strerror or error}"
            raise ConfigError(f"serving_config.access_log: {path} {rule}") from None
    writer = LogWriter(handler, lambda text: logger.error("serving_config.access_log: %s %s", path, text))
    return AccessLog(writer.put, reopen=writer.reopen), writer.close


class _StandardOutput(logging.StreamHandler):  # type: ignore[type-arg]
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        raise


def _add_usage(line: AccessLine, note: RequestContext, outputs: Sequence[RequestOutput | None]) -> None:
    known = [output for output in outputs if output is not None]
    line.prompt_tokens = note.num_prompt_tokens
    line.cached_tokens = sum(output.num_cached_tokens for output in outputs[:: note.streams_per_prompt] if output)
    line.output_tokens = sum(output.num_output_tokens for output in known)
    reasons = {"abort" if output is None else output.finish_reason or "abort" for output in outputs}
    line.finish = ",".join(sorted(reasons))
    if known:
        line.queue_ms = _ms(known[0].queued_s)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


class Accounting:
    """ASGI middleware around everything else; streams pass as they are.

    Args:
        app: The application.
        clock: The engine's.
        metrics: Counts requests.
        access_log: None: nobody wants one.
        paths: Of all routes without parameters in them.
        tracer: Gets the spans of requests; None: nobody wants traces.
    """

    def __init__(
        self,
        app: ASGIApp,
        clock: Clock,
        metrics: HttpMetrics,
        access_log: AccessLog | None,
        paths: Collection[str],
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self._app = app
        self._clock = clock
        self._metrics = metrics
        self._access_log = access_log
        self._paths = frozenset(paths)
        self._refusals = LineBudget(REFUSED_LOG_BURST, REFUSED_LOG_LINES_PER_SECOND)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        http_timings = HttpTimings(scope.get(ARRIVED_KEY) or self._clock())
        path, method, client = scope["path"], scope["method"], scope.get("client")
        if client and not _may_be_address(client[0]):
            scope["client"] = client = None
        note = RequestContext(
            http_timings, method if method in METHODS else OTHER, path if path in self._paths else OTHER
        )
        note.client = client[0] if client else ""
        scope[CONTEXT_KEY] = note
        context = None if self._tracer is None or path in PROBES else context_of(scope["headers"])

        def send_and_note(message: Message) -> Awaitable[None]:
            if message["type"] != "http.response.body":
                note.status = message.get("status", note.status)
                if context is not None and message["type"] == "http.response.start":
                    message["headers"] = [*message.get("headers", ()), (HEADER, context.header)]
            elif not message.get("more_body", False):
                # Just before: a client that has the whole answer never measures less than the server.
                http_timings.response_sent_time = self._clock()
            return send(message)

        failed = True
        try:
            await self._app(scope, receive, send_and_note)
            failed = False
        except asyncio.CancelledError:  # nobody waits for the answer any more
            failed = False
            raise
        finally:
            if http_timings.response_sent_time is None:  # the client has left
                http_timings.response_sent_time = self._clock()
            status = note.status
            if status is None:
                status = HTTPStatus.INTERNAL_SERVER_ERROR if failed else CLIENT_LEFT
            self._tell(note, int(status), http_timings.response_sent_time)
            if self._tracer is not None and context is not None:
                self._tracer.answered(context, note, int(status), http_timings.response_sent_time)

    def refused(self, address: str, status: int) -> None:
        """Notes what was answered before it had become a request: no place, no HTTP, beyond a limit, too late."""
        now = self._clock()
        note = RequestContext(HttpTimings(now), OTHER, OTHER, client=address, error="connection limits")
        self._tell(note, int(status), now)

    def _tell(self, note: RequestContext, status: int, now: float) -> None:
        self._metrics.answered(note.method, note.route, status, note.longest_answers)
        if note.route in PROBES and status in (HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE):
            return
        if self._access_log is not None:
            self._access_log.write(note, status, now)
        if status < 400 or status == CLIENT_LEFT:
            return
        suppressed = self._refusals.take(now)
        if suppressed is not None:
            more = f"; {suppressed} others were not shown" if suppressed else ""
            who = f"{note.client}, {note.tenant}" if note.tenant else note.client
            logger.warning(
                "%s %s from %s: status %d%s%s",
                note.method,
                note.route,
                who,
                status,
                f", {note.error}" if note.error else "",
                more,
            )


def _may_be_address(text: str) -> bool:
    """Whether logs and tables may hold it: a proxy that is believed may pass on what its client claims."""
    return len(text) <= MAX_ADDRESS_CHARS and text.isascii() and text.isprintable()
