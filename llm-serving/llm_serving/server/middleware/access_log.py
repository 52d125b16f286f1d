"""Access log, HTTP metrics and timings of every HTTP request, without any text of requests and responses."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
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
from llm_serving.observability.component_metrics import HttpMetrics
from llm_serving.server.http.request import REQUEST_KEY, HttpRequest
from llm_serving.server.middleware.rate_limits import LineBudget
from llm_serving.server.middleware.tracing import HEADER, Tracer, context_of
from llm_serving.server.request_context import CONTEXT_KEY, RequestContext

logger = get_logger(__name__)
STANDARD_OUTPUT: Final = Path("-")
REFUSED_BURST, REFUSED_PER_SECOND = 200, 20.0
"""Limits of access log lines for refused requests (4xx, 503), so that they do not displace other lines."""
_encode: Final = msgspec.json.Encoder().encode
OTHER: Final = "other"
"""Stands for a route or method that the server does not have."""
METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
PROBES: Final = frozenset(("/health", "/ping", "/metrics"))
"""Routes that monitoring polls. They are counted in the metrics, and logged only when they fail."""
CLIENT_LEFT: Final = 499
MAX_ADDRESS_CHARS: Final = 64
REFUSED_LOG_BURST, REFUSED_LOG_LINES_PER_SECOND = 10, 0.2
"""Limits of lines for refused and failed requests in the server's log. The metrics count all of them."""


class AccessLine(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One line of the access log. Times in ms count from the arrival of the request's headers, unless noted."""

    time: str
    client: str
    method: str
    route: str
    status: int
    total_ms: float
    id: str | None = None
    tenant: str | None = None
    request_class: str | None = msgspec.field(default=None, name="class")
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish: str | None = None
    """Finish reasons of all choices, sorted and separated by commas. `abort` means that the client disconnected."""
    queue_ms: float | None = None
    """Time from the arrival at the engine to the first scheduling."""
    ttft_ms: float | None = None
    error: str | None = None
    suppressed: int | None = None


@dataclass(eq=False)
class AccessLog:
    """Writes one JSON line per request with `put`, which must not block. Lines of refused requests are rate-limited."""

    put: Callable[[str], None]
    wall_clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    reopen: Callable[[], None] = lambda: None
    _refusals: LineBudget = field(default_factory=lambda: LineBudget(REFUSED_BURST, REFUSED_PER_SECOND))

    def write(self, context: RequestContext, status: int, now: float) -> None:
        suppressed: int | None = 0
        if 400 <= status < 499 or status == HTTPStatus.SERVICE_UNAVAILABLE:
            suppressed = self._refusals.take(now)
            if suppressed is None:
                return
        began = context.http_timings.received_time
        line = AccessLine(
            time=self.wall_clock().isoformat(timespec="milliseconds"),
            client=context.client,
            method=context.method,
            route=context.route,
            status=status,
            total_ms=_ms(now - began),
            id=context.request_id or None,
            tenant=context.tenant or None,
            request_class=context.request_class or None,
            error=context.error or None,
            suppressed=suppressed or None,
        )
        if context.streams:
            _add_usage(line, context, context.outputs)
            first = context.http_timings.first_token_time
            line.ttft_ms = None if first is None else _ms(first - began)
        self.put(_encode(line).decode())


def open_access_log(serving: ServerConfig) -> tuple[AccessLog | None, Callable[[], None]]:
    """Return the access log, if any, and a function that closes it. Raise ConfigError if it cannot be opened."""
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


def _add_usage(line: AccessLine, context: RequestContext, outputs: Sequence[RequestOutput | None]) -> None:
    known = [output for output in outputs if output is not None]
    line.prompt_tokens = context.num_prompt_tokens
    line.cached_tokens = sum(output.num_cached_tokens for output in outputs[:: context.streams_per_prompt] if output)
    line.output_tokens = sum(output.num_output_tokens for output in known)
    reasons = {"abort" if output is None else output.finish_reason or "abort" for output in outputs}
    line.finish = ",".join(sorted(reasons))
    if known:
        line.queue_ms = _ms(known[0].queued_s)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


@dataclass(eq=False)
class Accounting:
    """Outermost ASGI middleware: records timings, metrics, access log and trace of every request."""

    app: ASGIApp
    clock: Clock
    metrics: HttpMetrics
    access_log: AccessLog | None
    paths: frozenset[str]
    tracer: Tracer | None = None
    _refusals: LineBudget = field(default_factory=lambda: LineBudget(REFUSED_LOG_BURST, REFUSED_LOG_LINES_PER_SECOND))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        http_request: HttpRequest | None = scope.get(REQUEST_KEY)
        http_timings = HttpTimings(self.clock() if http_request is None else http_request.arrived)
        path, method, client = scope["path"], scope["method"], scope.get("client")
        # A trusted proxy may pass on any text that its client sent as its address.
        if client and not (len(client[0]) <= MAX_ADDRESS_CHARS and client[0].isascii() and client[0].isprintable()):
            scope["client"] = client = None
        context = RequestContext(
            http_timings,
            method if method in METHODS else OTHER,
            path if path in self.paths else OTHER,
            client[0] if client else "",
            dict(reversed(scope["headers"])),
        )
        scope[CONTEXT_KEY] = context
        trace = None if self.tracer is None or path in PROBES else context_of(scope["headers"])

        def send_and_record(message: Message) -> Awaitable[None]:
            if message["type"] != "http.response.body":
                context.status = message.get("status", context.status)
                if trace is not None and message["type"] == "http.response.start":
                    message["headers"] = [*message.get("headers", ()), (HEADER, trace.header)]
            elif not message.get("more_body", False):
                # Set the time before sending, so that no client measures a shorter time than the server.
                http_timings.response_sent_time = self.clock()
            return send(message)

        failed = True
        try:
            await self.app(scope, receive, send_and_record)
            failed = False
        except asyncio.CancelledError:  # the client has disconnected
            failed = False
            raise
        finally:
            if http_timings.response_sent_time is None:  # the client has disconnected
                http_timings.response_sent_time = self.clock()
            status = context.status
            if status is None:
                status = HTTPStatus.INTERNAL_SERVER_ERROR if failed else CLIENT_LEFT
            self._record(context, int(status), http_timings.response_sent_time)
            if self.tracer is not None and trace is not None:
                self.tracer.answered(trace, context, int(status), http_timings.response_sent_time)

    def refused(self, address: str, status: int) -> None:
        """Log and count a connection that was refused with the HTTP status `status` before it sent a request."""
        now = self.clock()
        context = RequestContext(HttpTimings(now), OTHER, OTHER, client=address, error="connection limits")
        self._record(context, int(status), now)

    def _record(self, context: RequestContext, status: int, now: float) -> None:
        self.metrics.answered(context.method, context.route, status, context.longest_answers)
        if context.route in PROBES and status in (HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE):
            return
        if self.access_log is not None:
            self.access_log.write(context, status, now)
        if status < 400 or status == CLIENT_LEFT:
            return
        suppressed = self._refusals.take(now)
        if suppressed is not None:
            more = f"; {suppressed} more suppressed" if suppressed else ""
            who = f"{context.client}, {context.tenant}" if context.tenant else context.client
            logger.warning(
                "%s %s from %s: status %d%s%s",
                context.method,
                context.route,
                who,
                status,
                f", {context.error}" if context.error else "",
                more,
            )
