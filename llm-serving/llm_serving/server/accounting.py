"""Every request is noted: its times for the engine, a count for /metrics, a line for the logs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from http import HTTPStatus
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llm_serving.core.clock import Clock
from llm_serving.core.exchange import Exchange
from llm_serving.log import get_logger
from llm_serving.observe.http_metrics import HttpMetrics
from llm_serving.server.access_log import AccessLog
from llm_serving.server.front_door import ARRIVED_KEY
from llm_serving.server.line_budget import LineBudget
from llm_serving.server.note import SCOPE_KEY, Note
from llm_serving.server.tracing import HEADER, Tracer, context_of

logger = get_logger(__name__)

OTHER: Final = "other"
"""Route and method of what the server does not know."""
METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
PROBES: Final = frozenset(("/health", "/ping", "/metrics"))
"""Asked again and again by machines: counted, and lines only where something is wrong."""
CLIENT_LEFT: Final = 499
MAX_ADDRESS_CHARS: Final = 64
REFUSED_BURST, REFUSED_PER_SECOND = 10, 0.2
"""Lines in the server's log for requests that were refused or failed; /metrics counts all of them."""


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
        self._refusals = LineBudget(REFUSED_BURST, REFUSED_PER_SECOND)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope.get(ARRIVED_KEY) or self._clock())
        path, method, client = scope["path"], scope["method"], scope.get("client")
        if client and not _may_be_address(client[0]):
            scope["client"] = client = None
        note = Note(exchange, method if method in METHODS else OTHER, path if path in self._paths else OTHER)
        note.client = client[0] if client else ""
        scope[SCOPE_KEY] = note
        context = None if self._tracer is None or path in PROBES else context_of(scope["headers"])

        def send_and_note(message: Message) -> Awaitable[None]:
            if message["type"] != "http.response.body":
                note.status = message.get("status", note.status)
                if context is not None and message["type"] == "http.response.start":
                    message["headers"] = [*message.get("headers", ()), (HEADER, context.header)]
            elif not message.get("more_body", False):
                # Just before: a client that has the whole answer never measures less than the server.
                exchange.answered_time = self._clock()
            return send(message)

        failed = True
        try:
            await self._app(scope, receive, send_and_note)
            failed = False
        except asyncio.CancelledError:  # nobody waits for the answer any more
            failed = False
            raise
        finally:
            if exchange.answered_time is None:  # the client has left
                exchange.answered_time = self._clock()
            status = note.status
            if status is None:
                status = HTTPStatus.INTERNAL_SERVER_ERROR if failed else CLIENT_LEFT
            self._tell(note, int(status), exchange.answered_time)
            if self._tracer is not None and context is not None:
                self._tracer.answered(context, note, int(status), exchange.answered_time)

    def refused(self, address: str, status: int) -> None:
        """Notes what was answered before it had become a request: no place, no HTTP, beyond a limit, too late."""
        now = self._clock()
        note = Note(Exchange(now), OTHER, OTHER, client=address, error="front door")
        self._tell(note, int(status), now)

    def _tell(self, note: Note, status: int, now: float) -> None:
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
