"""OpenTelemetry traces: a span for each request, with child spans for queueing, prefill and decode, but without text of
requests and responses. Spans are posted to a collector as JSON over HTTP (OTLP 1). The header `traceparent` (W3C Trace
Context) gives a request's trace context and is returned in the response.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, Final, NamedTuple

from llm_serving import __version__
from llm_serving.log import get_logger
from llm_serving.server.request_context import RequestContext

logger = get_logger(__name__)

HEADER: Final = b"traceparent"
_CONTEXT: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1
MAX_PENDING: Final = 4096
"""Maximum number of spans in the export queue. Further spans are dropped and counted."""
MAX_SENT: Final = 512
MAX_ANSWER_BYTES: Final = 2**16
SEND_EVERY_S: Final = 1.0
"""Seconds between two messages to the collector, unless `MAX_SENT` spans are waiting."""
TIMEOUT_S: Final = 5.0
"""Maximum seconds of a message, and of the export when the process exits."""
_SERVER, _INTERNAL = 2, 1
_ERROR: Final = 2

Span = dict[str, Any]
Send = Callable[[bytes], None]


class TraceContext(NamedTuple):
    trace_id: str
    span_id: str
    parent_id: str = ""

    @property
    def header(self) -> bytes:
        return f"00-{self.trace_id}-{self.span_id}-01".encode()


def context_of(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """Return the trace context: a new one if `traceparent` is missing or invalid, None if it says 'not sampled'."""
    given = [value for name, value in headers if name == HEADER]
    found = _CONTEXT.fullmatch(given[0].decode("latin-1")) if len(given) == 1 else None
    if found is None or int(found[1], 16) == 0 or int(found[2], 16) == 0 or (given[0][:2] == b"00" and found[4]):
        return TraceContext(secrets.token_hex(16), secrets.token_hex(8))
    if not int(found[3], 16) & _SAMPLED:
        return None
    return TraceContext(found[1], secrets.token_hex(8), found[2])


def spans_of(context: TraceContext, request: RequestContext, status: int, now: float, epoch: float) -> Iterator[Span]:
    """Yield the spans of a request that ended at `now`, a time of the engine's clock. `epoch` is the Unix time in
    seconds at which this clock showed 0.
    """

    def span(name: str, kind: int, start: float, end: float, span_id: str, parent_id: str) -> Span:
        ids = {"traceId": context.trace_id, "spanId": span_id} | ({"parentSpanId": parent_id} if parent_id else {})
        times = {"startTimeUnixNano": _nanoseconds(epoch + start), "endTimeUnixNano": _nanoseconds(epoch + end)}
        return {**ids, "name": name, "kind": kind, **times}

    http_timings = request.http_timings
    root = span(
        f"{request.method} {request.route}",
        _SERVER,
        http_timings.received_time,
        now,
        context.span_id,
        context.parent_id,
    )
    root["attributes"] = _attributes(request, status)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        root["status"] = {"code": _ERROR, "message": request.error}
    yield root
    known = [output for output in request.outputs if output is not None]
    arrived, first = http_timings.arrival_time, http_timings.first_token_time
    if not known or arrived is None:
        return
    scheduled = arrived + known[0].queued_s
    ended = max(scheduled, http_timings.last_finished_time or now)
    computed = ended if first is None else max(scheduled, first)
    phases = [("queue", arrived, scheduled), ("prefill", scheduled, computed)]
    if first is not None:
        phases.append(("decode", computed, max(computed, ended)))
    for name, start, end in phases:
        yield span(name, _INTERNAL, start, end, secrets.token_hex(8), context.span_id)


class Tracer:
    """Sends spans to the collector in its own thread. `send` posts one message, or raises OSError or HTTPException."""

    def __init__(self, send: Send, service: str, wall_clock: Callable[[], float] = time.time) -> None:
        self._send = send
        self._wall_clock = wall_clock
        self._resource = {
            "attributes": [_attribute("service.name", service), _attribute("service.version", __version__)]
        }
        self._pending: deque[Span] = deque()
        self._num_dropped = 0
        self._is_failing = False
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def answered(self, context: TraceContext, request: RequestContext, status: int, now: float) -> None:
        spans = list(spans_of(context, request, status, now, self._wall_clock() - now))
        with self._wake:
            if len(self._pending) + len(spans) > MAX_PENDING:
                self._num_dropped += len(spans)
                return
            self._pending += spans
            if len(self._pending) >= MAX_SENT:
                self._wake.notify()

    def close(self) -> None:
        """Export the remaining spans within `TIMEOUT_S`, then end the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._wake:
                if not self._closed and len(self._pending) < MAX_SENT:
                    self._wake.wait(SEND_EVERY_S)
                spans = [self._pending.popleft() for _ in range(min(MAX_SENT, len(self._pending)))]
                num_dropped, self._num_dropped = self._num_dropped, 0
                closed = self._closed
            if num_dropped:
                logger.warning("%d spans were dropped because the collector is too slow", num_dropped)
            if spans:
                self._try_to_send(spans)
            elif closed:
                return

    def _try_to_send(self, spans: list[Span]) -> None:
        scope = {"scope": {"name": "llm_serving", "version": __version__}, "spans": spans}
        message = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]}
        try:
            self._send(json.dumps(message).encode())
        except (OSError, HTTPException) as error:  # HTTPException: the collector's answer is not HTTP
            if not self._is_failing:
                logger.warning("serving_config.otlp_endpoint: traces cannot be sent: %s", error or type(error).__name__)
            self._is_failing = True
        else:
            if self._is_failing:
                logger.warning("serving_config.otlp_endpoint: traces are sent again")
            self._is_failing = False


def send_to(endpoint: str) -> Send:
    def send(message: bytes) -> None:
        request = urllib.request.Request(endpoint, message, {"Content-Type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310  the rule of the key checks it
            answer.read(MAX_ANSWER_BYTES)

    return send


def _attributes(request: RequestContext, status: int) -> list[dict[str, Any]]:
    outputs = [output for output in request.outputs if output is not None]
    values: dict[str, str | int] = {
        "http.request.method": request.method,
        "http.route": request.route,
        "http.response.status_code": status,
        "client.address": request.client,
        "error.type": request.error,
        "gen_ai.response.id": request.request_id,
        "llm_serving.tenant": request.tenant,
        "llm_serving.class": request.request_class,
    }
    if outputs:
        values["gen_ai.usage.input_tokens"] = request.num_prompt_tokens
        values["gen_ai.usage.output_tokens"] = sum(output.num_output_tokens for output in outputs)
        values["gen_ai.usage.cache_read.input_tokens"] = sum(
            output.num_cached_tokens for output in request.outputs[:: request.streams_per_prompt] if output
        )
        reasons = sorted({str(output.finish_reason or "abort") for output in outputs})
        values["gen_ai.response.finish_reasons"] = ",".join(reasons)
    return [_attribute(name, value) for name, value in values.items() if value != ""]


def _attribute(name: str, value: str | int) -> dict[str, Any]:
    return {"key": name, "value": {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)}}


def _nanoseconds(seconds: float) -> str:
    return str(round(seconds * 1e6) * 1000)
