"""Traces for OpenTelemetry: a request as a span, with what it waited for and what was computed as spans within.

Spans go to a collector as JSON over HTTP (OTLP 1), with nothing but the standard library. Contexts of W3C are taken
from requests (`traceparent`) and told in answers. A span has numbers and names, never a text of a request or an answer.
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
"""Spans that wait for a collector; further ones are dropped and counted."""
MAX_SENT: Final = 512
"""Spans of one message."""
MAX_ANSWER_BYTES: Final = 2**16
"""Of a collector, that are read."""
SEND_EVERY_S: Final = 1.0
"""Spans are collected for so long before they are sent."""
TIMEOUT_S: Final = 5.0
"""Of one message, and of the end of the process."""
_SERVER, _INTERNAL = 2, 1
_ERROR: Final = 2

Span = dict[str, Any]
Send = Callable[[bytes], None]


class TraceContext(NamedTuple):
    """Of which trace a request is."""

    trace_id: str
    span_id: str
    """Of its own span."""
    parent_id: str = ""
    """Of who sent it; empty: nobody said."""

    @property
    def header(self) -> bytes:
        return f"00-{self.trace_id}-{self.span_id}-01".encode()


def context_of(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """What the headers say; a new trace where they say nothing valid, None where they say that it is not to be kept."""
    given = [value for name, value in headers if name == HEADER]
    found = _CONTEXT.fullmatch(given[0].decode("latin-1")) if len(given) == 1 else None
    if found is None or int(found[1], 16) == 0 or int(found[2], 16) == 0 or (given[0][:2] == b"00" and found[4]):
        return TraceContext(secrets.token_hex(16), secrets.token_hex(8))
    if not int(found[3], 16) & _SAMPLED:
        return None
    return TraceContext(found[1], secrets.token_hex(8), found[2])


def spans_of(context: TraceContext, note: RequestContext, status: int, now: float, epoch: float) -> Iterator[Span]:
    """The spans of an answered request.

    Args:
        context: Of the request.
        note: What is known of it.
        status: Of the answer.
        now: When it ended, in seconds on the engine's clock.
        epoch: Seconds since 1970 when that clock showed 0.
    """

    def span(name: str, kind: int, start: float, end: float, span_id: str, parent_id: str) -> Span:
        ids = {"traceId": context.trace_id, "spanId": span_id} | ({"parentSpanId": parent_id} if parent_id else {})
        times = {"startTimeUnixNano": _nanoseconds(epoch + start), "endTimeUnixNano": _nanoseconds(epoch + end)}
        return {**ids, "name": name, "kind": kind, **times}

    http_timings = note.http_timings
    root = span(
        f"{note.method} {note.route}", _SERVER, http_timings.received_time, now, context.span_id, context.parent_id
    )
    root["attributes"] = _attributes(note, status)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        root["status"] = {"code": _ERROR, "message": note.error}
    yield root
    known = [output for output in note.outputs or () if output is not None]
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
    """Sends spans from a thread of its own: who is traced never waits for the collector.

    Args:
        send: Sends a message, or raises OSError or HTTPException.
        service: Name of the service in the traces.
        wall_clock: Seconds since 1970.
    """

    def __init__(self, send: Send, service: str, wall_clock: Callable[[], float] = time.time) -> None:
        self._send = send
        self._wall_clock = wall_clock
        self._resource = {
            "attributes": [_attribute("service.name", service), _attribute("service.version", __version__)]
        }
        self._pending: deque[Span] = deque()
        self._num_lost = 0
        self._fails = False
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def answered(self, context: TraceContext, note: RequestContext, status: int, now: float) -> None:
        """Takes a request that was answered with `status` at `now`, on the engine's clock."""
        spans = list(spans_of(context, note, status, now, self._wall_clock() - now))
        with self._wake:
            if len(self._pending) + len(spans) > MAX_PENDING:
                self._num_lost += len(spans)
                return
            self._pending += spans
            if len(self._pending) >= MAX_SENT:
                self._wake.notify()

    def close(self) -> None:
        """Sends what is left, for a while."""
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
                num_lost, self._num_lost = self._num_lost, 0
                closed = self._closed
            if num_lost:
                logger.warning("%d spans were dropped: the collector does not keep up", num_lost)
            if spans:
                self._try_to_send(spans)
            elif closed:
                return

    def _try_to_send(self, spans: list[Span]) -> None:
        scope = {"scope": {"name": "llm_serving", "version": __version__}, "spans": spans}
        message = {"resourceSpans": [{"resource": self._resource, "scopeSpans": [scope]}]}
        try:
            self._send(json.dumps(message).encode())
        except (OSError, HTTPException) as error:  # the latter: what answers is no HTTP
            if not self._fails:
                logger.warning("serving_config.otlp_endpoint: traces cannot be sent: %s", error or type(error).__name__)
            self._fails = True
        else:
            if self._fails:
                logger.warning("serving_config.otlp_endpoint: traces are sent again")
            self._fails = False


def send_to(endpoint: str) -> Send:
    """What posts messages to a collector's address; its errors are OSErrors and HTTPExceptions."""

    def send(message: bytes) -> None:
        request = urllib.request.Request(endpoint, message, {"Content-Type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310  the rule of the key checks it
            answer.read(MAX_ANSWER_BYTES)

    return send


def _attributes(note: RequestContext, status: int) -> list[dict[str, Any]]:
    """By the names of OpenTelemetry's conventions where it has one."""
    outputs = [output for output in note.outputs or () if output is not None]
    values: dict[str, str | int] = {
        "http.request.method": note.method,
        "http.route": note.route,
        "http.response.status_code": status,
        "client.address": note.client,
        "error.type": note.error,
        "gen_ai.response.id": note.request_id,
        "llm_serving.tenant": note.tenant,
        "llm_serving.class": note.request_class,
    }
    if outputs:
        values["gen_ai.usage.input_tokens"] = note.num_prompt_tokens
        values["gen_ai.usage.output_tokens"] = sum(output.num_output_tokens for output in outputs)
        values["gen_ai.usage.cache_read.input_tokens"] = sum(
            output.num_cached_tokens for output in (note.outputs or ())[:: note.streams_per_prompt] if output
        )
        reasons = sorted({str(output.finish_reason or "abort") for output in outputs})
        values["gen_ai.response.finish_reasons"] = ",".join(reasons)
    return [_attribute(name, value) for name, value in values.items() if value != ""]


def _attribute(name: str, value: str | int) -> dict[str, Any]:
    return {"key": name, "value": {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)}}


def _nanoseconds(seconds: float) -> str:
    return str(round(seconds * 1e6) * 1000)
