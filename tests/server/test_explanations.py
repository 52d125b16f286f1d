"""Routes that explain times: permissions, the ids of clients, and the timings of each HTTP request."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import httpx
import pytest
from llm_serving.config.tables import ApiKey
from llm_serving.core.request import FinishReason
from llm_serving.core.timings import HttpTimings
from llm_serving.observability.event_log import EventLog, client_ids
from llm_serving.observability.latency_breakdown import answers_to, explain
from llm_serving.server.admin import requests
from llm_serving.server.app import create_app
from llm_serving.server.middleware.authentication import hash_key
from llm_serving.server.openapi import openapi_document
from llm_serving.server.routes import ENDPOINTS
from support.engine_harness import Harness
from support.factories import create_request
from support.fakes import FakeEngine, Script
from support.server_client import RawClient, error_of, leave_while_held, post, request

KEY = "sesame-open-the-door"
KEYS = (ApiKey(name="team-a", key_sha256=hash_key(KEY)),)


def an_explanation(*, with_tenant: bool = False):
    harness = Harness(event_log=EventLog(10, 100))
    asked = create_request(request_id="abc-0", tenant="team-a", max_tokens=3)
    asked.http_timings = HttpTimings(0.0, predicted_ttft_s=1.5)
    harness.engine.submit(asked)
    harness.run()
    [life] = harness.engine.event_log.records()
    return explain(
        life, harness.engine.event_log.snapshot(99.0), harness.scheduler.bounds[1], 0, with_tenant=with_tenant
    )


def test_explanation_describes_the_times_of_a_request():
    engine = FakeEngine(explanations=[an_explanation()])
    answer = request(engine, "GET", "/v1/requests/cmpl-abc/explain").json()
    assert engine.asked == [("cmpl-abc", None)]
    assert answer["request_id"] == "cmpl-abc"
    [explained] = answer["requests"]
    assert (explained["id"], explained["request_class"], explained["tenant"]) == ("abc-0", "normal", None)
    assert (explained["status"], explained["finish_reason"]) == ("finished", "length")
    assert explained["tokens"] == {"prompt": 4, "cached": 0, "output": 3, "accepted_draft": 0, "guessed": 0}
    assert explained["first_token"]["predicted_ms"] == 1500.0
    assert 0.0 < explained["first_token"]["real_ms"] <= explained["wall_ms"]
    assert explained["steps"] == {
        "first": 0,
        "last": 3,
        "prefill": 1,
        "computed_again": 0,
        "decode": 3,
        "left_out": 0,
    } or (explained["steps"]["prefill"] == 1)
    assert explained["bounds"]["decode_gap"] == {"bound": 2, "met": 0}
    assert sum(part["ms"] for part in explained["parts"]) == pytest.approx(explained["wall_ms"], abs=1e-6)


def test_explanation_of_an_unknown_request_is_404():
    response = request(FakeEngine(), "GET", "/v1/requests/nobody/explain")
    assert response.status_code == 404
    error = error_of(response)
    assert (error["type"], error["code"], error["param"]) == ("not_found_error", "request_not_found", "request_id")
    assert "serving_config.explain_requests" in error["message"]


def test_explanation_is_limited_to_the_tenant():
    engine = FakeEngine(api_keys=KEYS, explanations=[an_explanation(with_tenant=True)])
    headers = {"x-api-key": KEY}
    assert request(engine, "GET", "/v1/requests/a/explain", headers=headers).json()["requests"][0]["tenant"] == "team-a"
    assert request(engine, "GET", "/v1/timeline", headers=headers).status_code == 200
    assert engine.asked == [("a", "team-a"), (10000, "team-a")]


def test_explanation_for_an_administrator_covers_all_tenants():
    admin = ApiKey(name="root", key_sha256=hash_key("r" * 20), admin=True)
    engine = FakeEngine(api_keys=(*KEYS, admin), explanations=[an_explanation(with_tenant=True)])
    headers = {"x-api-key": "r" * 20}
    assert request(engine, "GET", "/v1/requests/a/explain", headers=headers).json()["requests"][0]["tenant"] == "team-a"
    assert request(engine, "GET", "/v1/timeline", headers=headers).status_code == 200
    assert engine.asked == [("a", None), (10000, None)]


@pytest.mark.parametrize("steps", ["0", "-1", "10001", "x", "", "1.5", "9" * 5000, "%D9%A3"])
def test_timeline_refuses_an_invalid_number_of_steps(steps):
    response = request(FakeEngine(), "GET", f"/v1/timeline?steps={steps}")
    assert response.status_code == 400
    assert "must be an integer from 1 to 10000" in error_of(response)["message"]


def test_timeline_can_be_limited():
    engine = FakeEngine()
    assert request(engine, "GET", "/v1/timeline?steps=7").json() == {"traceEvents": [], "displayTimeUnit": "ms"}
    assert engine.asked == [(7, None)]


def test_explanation_lookups_use_one_thread():
    """Each lookup holds Python's lock, which the engines need."""
    threads = set()

    class Engine(FakeEngine):
        def explain(self, request_id, tenant=None):
            threads.add(threading.current_thread())
            return super().explain(request_id, tenant)

        def timeline(self, num_steps, tenant=None):
            threads.add(threading.current_thread())
            return super().timeline(num_steps, tenant)

    async def talking():
        transport = httpx.ASGITransport(create_app(Engine()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            paths = ["/v1/timeline", "/v1/requests/a/explain"] * 8
            return [each.status_code for each in await asyncio.gather(*map(client.get, paths))]

    assert asyncio.run(talking()) == [200, 404] * 8
    assert len(threads) == 1 and threading.main_thread() not in threads


@pytest.mark.parametrize("path", ["/v1/timeline", "/v1/requests/a/explain"])
def test_explanation_lookup_is_skipped_for_a_disconnected_client(path, monkeypatch):
    given = []

    class Occupied:
        """A thread that never runs a job."""

        def submit(self, owner, work):
            given.append(Future())
            client.leave()
            return given[-1]

    monkeypatch.setattr(requests, "_LOOKUPS", Occupied())
    client = RawClient(FakeEngine(), path, None)
    client._scope["method"] = "GET"
    asyncio.run(client.run())
    assert [each.cancelled() for each in given] == [True]


@pytest.mark.parametrize(
    ("request_id", "engine_id", "expected"),
    [
        ("abc", "abc-7", True),
        ("cmpl-abc", "abc-7", True),
        ("chatcmpl-abc", "abc-7", True),
        ("cmpl-abc", "cmpl-abc-7", True),
        ("abc-7", "abc-7", True),
        ("a-b", "a-b-12", True),
        ("ab", "abc-7", False),
        ("abc-8", "abc-7", False),
        ("", "abc-7", False),
        ("other-abc", "abc-7", False),
    ],
)
def test_explanation_accepts_the_ids_of_every_protocol(request_id, engine_id, expected):
    known = create_request(request_id=engine_id)
    log = EventLog(num_requests=1)
    log.submitted(known, known.request_class)
    assert answers_to(log.records()[0], client_ids(request_id)) is expected


def test_explanation_routes_are_documented():
    document = openapi_document(ENDPOINTS, with_keys=False)
    operation = document["paths"]["/v1/requests/{request_id}/explain"]["get"]
    assert operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/Explanations")
    assert "/v1/timeline" in document["paths"]
    assert {"Explanation", "ExplainedPart"} <= document["components"]["schemas"].keys()


@pytest.mark.parametrize("stream", [False, True])
def test_http_timings_cover_headers_to_last_piece(stream):
    engine = FakeEngine()
    body = {"prompt": "Hello", "n": 2, "stream": stream}
    assert post(engine, "/v1/completions", body).status_code == 200
    first, second = engine.http_timings
    assert first is second is not None
    assert first.response_sent_time is not None
    assert 0 < first.received_time < first.response_sent_time <= engine.clock()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/generate", {"inputs": "Hello"}),
        ("/models/llama2", {"inputs": "Hello", "parameters": {"max_new_tokens": 4}}),
    ],
)
def test_http_timings_are_recorded_for_every_protocol(path, body):
    engine = FakeEngine()
    assert post(engine, path, body).status_code == 200
    [http_timings] = engine.http_timings
    assert http_timings is not None and http_timings.response_sent_time is not None


def test_http_timings_of_a_failure_have_an_end():
    engine = FakeEngine(script=Script(finish_reason=FinishReason.ERROR, error="it failed"))
    assert post(engine, "/v1/completions", {"prompt": "Hello"}).status_code == 500
    [http_timings] = engine.http_timings
    assert http_timings is not None and http_timings.response_sent_time is not None


def test_http_timings_end_before_the_last_piece_is_sent():
    engine = FakeEngine()
    noted: list[float | None] = []

    class Client(RawClient):
        async def _send(self, message):
            noted.append(engine.http_timings[0].response_sent_time)
            await super()._send(message)

    asyncio.run(Client(engine, "/v1/completions", {"prompt": "Hello", "stream": True}).run())
    assert noted[-1] is not None
    assert noted[:-1] == [None] * (len(noted) - 1)


@pytest.mark.parametrize("stream", [False, True])
def test_http_timings_end_with_a_disconnect(stream):
    engine = FakeEngine(script=Script(hold_after=1))
    leave_while_held(engine, "/v1/completions", {"prompt": "Hello", "stream": stream})
    [http_timings] = engine.http_timings
    assert http_timings is not None and http_timings.response_sent_time is not None
