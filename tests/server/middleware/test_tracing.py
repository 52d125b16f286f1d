"""Traces: W3C contexts, the spans of a request, and a collector that is available, slow or unreachable."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterator
from http.client import BadStatusLine, HTTPException
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from llm_serving.config import load_config
from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.timings import HttpTimings
from llm_serving.errors import ConfigError
from llm_serving.server.app import build_site
from llm_serving.server.middleware import tracing
from llm_serving.server.middleware.tracing import TraceContext, Tracer, context_of, send_to, spans_of
from llm_serving.server.request_context import RequestContext
from support.fakes import FULL_QUEUE, FakeEngine

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
WAIT_S = 30.0


def contexts(*values: bytes) -> TraceContext | None:
    return context_of([(b"host", b"x"), *((b"traceparent", value) for value in values)])


@pytest.mark.parametrize(
    "value", [f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-ff", f"cc-{TRACE}-{PARENT}-01-more"]
)
def test_trace_context_is_taken_from_the_header(value: str) -> None:
    context = contexts(value.encode())
    assert context is not None
    assert (context.trace_id, context.parent_id) == (TRACE, PARENT)
    assert context.header == f"00-{TRACE}-{context.span_id}-01".encode()
    assert context.span_id not in (PARENT, "0" * 16)


@pytest.mark.parametrize(
    "values",
    [
        (),
        (f"00-{TRACE}-{PARENT}-01-more",),
        (f"ff-{TRACE}-{PARENT}-01",),
        (f"00-{'0' * 32}-{PARENT}-01",),
        (f"00-{TRACE}-{'0' * 16}-01",),
        (f"00-{TRACE.upper()}-{PARENT}-01",),
        (f"00-{TRACE}-{PARENT}",),
        ("\xff",),
        (f"00-{TRACE}-{PARENT}-01",) * 2,
    ],
)
def test_invalid_trace_context_starts_a_new_trace(values: tuple[str, ...]) -> None:
    context = contexts(*(value.encode("latin-1") for value in values))
    assert context is not None
    assert (context.parent_id, len(context.trace_id), context.trace_id == TRACE) == ("", 32, False)


def test_unsampled_request_has_no_trace() -> None:
    assert contexts(f"00-{TRACE}-{PARENT}-00".encode()) is None


def noted(**times: float) -> RequestContext:
    http_timings = HttpTimings(10.0, last_finished_time=15.0, arrival_time=10.5)
    for name, value in times.items():
        setattr(http_timings, name, value)
    output = RequestOutput("r", "", (), (), 7, 3, 5, FinishReason.STOP, queued_s=1.5)
    return RequestContext(
        http_timings,
        "POST",
        "/v1/completions",
        request_id="r",
        tenant="t",
        num_prompt_tokens=7,
        streams=[SimpleNamespace(latest=output)],
    )


def times_of(spans: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    return {each["name"]: (int(each["startTimeUnixNano"]) / 1e9, int(each["endTimeUnixNano"]) / 1e9) for each in spans}


def test_request_has_a_root_span_and_phases() -> None:
    spans = list(spans_of(TraceContext(TRACE, "a" * 16, PARENT), noted(first_token_time=13.0), 200, 16.0, 1000.0))
    assert times_of(spans) == {
        "POST /v1/completions": (1010.0, 1016.0),
        "queue": (1010.5, 1012.0),
        "prefill": (1012.0, 1013.0),
        "decode": (1013.0, 1015.0),
    }
    root, *inner = spans
    assert (root["spanId"], root["parentSpanId"], root["kind"]) == ("a" * 16, PARENT, 2)
    assert {each["parentSpanId"] for each in inner} == {"a" * 16}
    assert {each["traceId"] for each in spans} == {TRACE}
    assert len({each["spanId"] for each in spans}) == 4
    attributes = {each["key"]: next(iter(each["value"].values())) for each in root["attributes"]}
    assert attributes["gen_ai.usage.input_tokens"] == "7"
    assert attributes["gen_ai.usage.output_tokens"] == "5"
    assert (attributes["http.response.status_code"], attributes["llm_serving.tenant"]) == ("200", "t")
    assert "status" not in root


def test_refused_request_has_only_a_root_span() -> None:
    refused = RequestContext(HttpTimings(10.0), "POST", "/v1/completions", error="CapacityError")
    [root] = spans_of(TraceContext(TRACE, "a" * 16), refused, 503, 11.0, 0.0)
    assert "parentSpanId" not in root
    assert root["status"] == {"code": 2, "message": "CapacityError"}


def test_embedding_request_has_no_decode_span() -> None:
    spans = list(spans_of(TraceContext(TRACE, "a" * 16), noted(), 200, 16.0, 0.0))
    assert [each["name"] for each in spans[1:]] == ["queue", "prefill"]
    assert times_of(spans)["prefill"] == (12.0, 15.0)


class Collector:
    """A collector that records the received spans; a test can make it fail."""

    def __init__(self) -> None:
        self.messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self.failures: queue.Queue[None] = queue.Queue()
        self.error: OSError | HTTPException | None = None

    def __call__(self, message: bytes) -> None:
        if self.error is not None:
            self.failures.put(None)
            raise self.error
        self.messages.put(json.loads(message))

    def spans(self) -> list[dict[str, Any]]:
        return self.messages.get(timeout=WAIT_S)["resourceSpans"][0]["scopeSpans"][0]["spans"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "SEND_EVERY_S", 0.001)


def ask(tracer: Tracer, engine: FakeEngine, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(build_site(engine, tracer=tracer).public)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            if path == "/health":
                return await client.get(path, headers=headers)
            return await client.post(path, json={"prompt": "x"}, headers=headers)

    return asyncio.run(send())


def test_server_returns_traceparent(quick: None) -> None:
    collector = Collector()
    tracer = Tracer(collector, "demo")
    response = ask(tracer, FakeEngine(), "/v1/completions", {"traceparent": f"00-{TRACE}-{PARENT}-01"})
    spans = collector.spans()
    assert spans[0]["name"] == "POST /v1/completions"
    assert response.headers["traceparent"] == f"00-{TRACE}-{spans[0]['spanId']}-01"
    untraced = ask(tracer, FakeEngine(), "/v1/completions", {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    probe = ask(tracer, FakeEngine(), "/health")
    assert "traceparent" not in untraced.headers.keys() | probe.headers.keys()
    refused = ask(tracer, FakeEngine(refusal=FULL_QUEUE), "/v1/completions")
    assert refused.status_code == 429
    assert collector.spans()[0]["traceId"] == refused.headers["traceparent"].split("-")[1]
    tracer.close()


def test_tracing_is_off_without_an_endpoint() -> None:
    response = ask(None, FakeEngine(), "/v1/completions", {"traceparent": f"00-{TRACE}-{PARENT}-01"})  # type: ignore[arg-type]
    assert "traceparent" not in response.headers


@pytest.mark.parametrize("error", [ConnectionRefusedError("gone"), BadStatusLine("gone")])
def test_unreachable_collector_is_logged_once_and_retried(
    quick: None, caplog: Any, error: OSError | HTTPException
) -> None:
    collector = Collector()
    collector.error = error
    tracer = Tracer(collector, "demo")
    context = TraceContext(TRACE, "a" * 16)
    for _ in range(2):
        tracer.answered(context, noted(), 200, 16.0)
        collector.failures.get(timeout=WAIT_S)
    collector.error = None
    tracer.answered(context, noted(), 200, 16.0)
    assert len(collector.spans()) == 3
    tracer.close()
    assert [record.message.partition("endpoint: ")[2] for record in caplog.records] == [
        "traces cannot be sent: gone",
        "traces are sent again",
    ]


def test_spans_beyond_the_queue_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(tracing, "MAX_PENDING", 3)
    collector, gate = Collector(), threading.Event()

    def send(message: bytes) -> None:
        gate.wait(WAIT_S)
        collector(message)

    tracer = Tracer(send, "demo")
    for _ in range(3):
        tracer.answered(TraceContext(TRACE, "a" * 16), noted(), 200, 16.0)
    gate.set()
    tracer.close()
    assert len(collector.spans()) == 3
    assert "6 spans were dropped" in caplog.text


def test_remaining_spans_are_exported_at_shutdown() -> None:
    collector = Collector()
    tracer = Tracer(collector, "demo", wall_clock=lambda: 1016.0)
    tracer.answered(TraceContext(TRACE, "a" * 16), noted(), 200, 16.0)
    tracer.close()
    assert times_of(collector.spans())["POST /v1/completions"] == (1010.0, 1016.0)


@pytest.fixture
def listener() -> Iterator[tuple[str, queue.Queue[tuple[str, str, bytes]]]]:
    got: queue.Queue[tuple[str, str, bytes]] = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.put((self.path, self.headers["content-type"], body))
            self.send_response(500 if self.path == "/full" else 200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", got
        server.shutdown()
        thread.join()


def test_spans_are_posted_as_json(listener: tuple[str, queue.Queue[tuple[str, str, bytes]]]) -> None:
    url, got = listener
    send_to(f"{url}/v1/traces")(b"{}")
    assert got.get(timeout=WAIT_S) == ("/v1/traces", "application/json", b"{}")
    with pytest.raises(OSError, match="500"):
        send_to(f"{url}/full")(b"{}")


def test_otlp_endpoint_is_checked() -> None:
    load_config(None, ["serving_config.otlp_endpoint=http://127.0.0.1:4318/v1/traces"])
    with pytest.raises(ConfigError, match="otlp_endpoint"):
        load_config(None, ["serving_config.otlp_endpoint=file:///etc/passwd"])
