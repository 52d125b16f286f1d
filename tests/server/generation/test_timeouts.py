"""`timeout_s` and its header: accepted values, and what clients of each protocol receive when it expires."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest
from llm_serving.admission.ttft_predictor import ReplicaSpeed
from llm_serving.core.timings import monotonic
from llm_serving.server.generation import conversation, pipeline, structured_output
from support.fakes import FakeEngine
from support.gated_server import GatedServer
from support.server_client import error_of, post

BODIES = {
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 300, "seed": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 300, "seed": 1},
    "/": {"inputs": "x", "parameters": {"max_new_tokens": 300, "seed": 1}},
    "/generate": {"inputs": "x", "parameters": {"max_new_tokens": 300, "seed": 1}},
    "/models/demo/generate": {"inputs": "x", "parameters": {"max_new_tokens": 300, "seed": 1}},
}
HEADER = "x-request-timeout-s"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("fields", "headers"), [({"timeout_s": 2.5}, {}), ({}, {HEADER: "2.5"})])
def test_timeout_is_accepted_by_every_protocol(path, fields, headers):
    engine = FakeEngine()
    short = {"parameters": {"max_new_tokens": 3}} if "inputs" in BODIES[path] else {"max_tokens": 3}
    body = BODIES[path] | short
    assert post(engine, path, body | fields, headers=headers).status_code == 200
    [submitted], [http_timings] = engine.submitted, engine.http_timings
    assert submitted.deadline == http_timings.received_time + 2.5


@pytest.mark.parametrize("path", [path for path, body in BODIES.items() if "inputs" in body])
def test_timeout_may_be_in_parameters(path):
    engine = FakeEngine()
    post(engine, path, {"inputs": "x", "parameters": {"max_new_tokens": 3, "timeout_s": 2}})
    assert engine.submitted[0].deadline == engine.http_timings[0].received_time + 2


def test_timeout_is_absent_by_default():
    engine = FakeEngine()
    post(engine, "/v1/completions", {"prompt": "x"})
    assert engine.submitted[0].deadline is None


@pytest.mark.parametrize(
    ("fields", "headers", "named"),
    [
        ({"timeout_s": 0}, {}, "`timeout_s` must be a number of seconds above 0 and at most 86400"),
        ({"timeout_s": -1.5}, {}, "`timeout_s` must be a number of seconds above 0"),
        ({"timeout_s": 86401}, {}, "at most 86400 (serving_config.max_timeout_s). Given: 86401"),
        ({"timeout_s": "5"}, {}, "`timeout_s` is not valid: expected `float | null`, got `str`"),
        ({}, {HEADER: "0"}, f"`{HEADER}` must be a number of seconds above 0"),
        ({}, {HEADER: "nan"}, f"`{HEADER}` must be a number of seconds above 0"),
        ({}, {HEADER: "1e3"}, f"`{HEADER}` must be a number"),
        ({}, {HEADER: ""}, f"`{HEADER}` must be a number"),
        ({"timeout_s": 2}, {HEADER: "3"}, f"`timeout_s` must equal the header {HEADER}"),
    ],
)
def test_timeout_error_names_the_field(fields, headers, named):
    engine = FakeEngine()
    response = post(engine, "/v1/completions", {"prompt": "x"} | fields, headers=headers)
    assert response.status_code == 400
    assert named in error_of(response)["message"]
    assert engine.submitted == []


def test_timeout_field_and_header_must_agree():
    assert post(FakeEngine(), "/v1/completions", {"prompt": "x", "timeout_s": 2}, headers={HEADER: "2.0"}).is_success


class StoppedClock:
    """A clock that stands still until a test sets it."""

    def __init__(self):
        self._now = 100.0
        self._since = None

    def __call__(self):
        return self._now if self._since is None else self._now + monotonic() - self._since

    def go_on(self, seconds):
        """Advance by so many seconds."""
        self._now += seconds
        self._since = monotonic()


class Late:
    """A server whose requests wait for a batch that never fills, so that only their deadlines end them."""

    def __init__(self):
        self.clock = StoppedClock()
        self.server = GatedServer(max_num_seqs=4, batch_waiting_time=3600.0, clock=self.clock)

    def ask(self, path, body):
        """Return the response to a request with 600 s, of which 0.05 are left once the engine has it."""

        async def run():
            async with self.server.running() as client:
                asking = asyncio.create_task(client.post(path, json=body | {"timeout_s": 600}))
                await self.server.reach(lambda: len(self.server.replica.scheduler.waiting) > 0)
                self.clock.go_on(599.95)
                self.server.replica.wake()
                answer = await asking
                await self.server.reach(lambda: not self.server.replica.has_unfinished_requests)
                assert self.server.replica.num_steps == 0
                assert self.server.engine.num_waiting == 0
                return answer

        return asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_timeout_on_openai_routes_is_504(path):
    answer = Late().ask(path, BODIES[path] | {"n": 2})
    assert answer.status_code == 504
    error = error_of(answer)
    assert (error["type"], error["code"]) == ("timeout_error", "timeout")
    assert error["message"] == "the request did not finish within its time limit of 600 s"


def test_timeout_ends_a_stream_with_an_error_event():
    answer = Late().ask("/v1/completions", BODIES["/v1/completions"] | {"stream": True})
    assert answer.status_code == 200
    assert '"message":"the request did not finish within its time limit of 600 s"' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


def test_timeout_on_tgi_routes_is_504():
    answer = Late().ask("/generate", BODIES["/generate"])
    assert (answer.status_code, answer.json()["error_type"]) == (504, "incomplete_generation")


def test_timeout_on_legacy_routes_is_a_failure():
    answer = Late().ask("/models/demo/generate", BODIES["/models/demo/generate"])
    assert (answer.status_code, answer.json()["finish_reason"]) == (200, "predict_failed")


class Occupied:
    """Threads that never run a job."""

    def __init__(self):
        self.given = []

    def submit(self, owner, work):
        self.given.append(Future())
        return self.given[-1]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/completions", {"guided_regex": "a"}),
        ("/generate", {"parameters": {"grammar": {"type": "regex", "value": "a"}}}),
    ],
)
def test_timeout_applies_before_the_engine_has_the_request(monkeypatch, path, fields):
    """Templates and grammars may wait behind those of other clients."""
    occupied, engine, within_deadline = Occupied(), FakeEngine(), pipeline.within_deadline

    def begin_late(deadline, clock, work):
        now[0] = 3601.0
        return within_deadline(deadline, clock, work)

    now = [0.0]
    engine.clock = lambda: now[0]
    monkeypatch.setattr(conversation, "_RENDERING", occupied)
    monkeypatch.setattr(structured_output, "_COMPILING", occupied)
    monkeypatch.setattr(pipeline, "within_deadline", begin_late)
    answer = post(engine, path, BODIES[path] | fields, headers={HEADER: "3600"})
    assert answer.status_code == 504
    assert "the deadline of the request has passed" in answer.text
    assert engine.submitted == []
    [given] = occupied.given
    assert given.cancelled()


@pytest.mark.parametrize("n", [1, 3])
def test_timeout_below_the_predicted_time_is_refused_at_admission(n):
    async def run():
        server = GatedServer()
        async with server.running() as client:
            # A step takes 10 s.
            server.replica.ttft_predictor.speed = ReplicaSpeed(server.replica.scheduler.limits, 10.0, 0.0, 0.5, 4)
            body = BODIES["/v1/completions"] | {"n": n, "max_tokens": 3}
            refused = await client.post("/v1/completions", json=body | {"timeout_s": 4})
            assert refused.status_code == 429
            assert error_of(refused)["code"] == "deadline"
            assert error_of(refused)["message"].startswith(
                "the first token is expected in 10 s, and `timeout_s` leaves "
            )
            assert 6 <= int(refused.headers["retry-after"]) <= 7
            assert refused.headers["x-queue-estimate-ms"] == "10000"
            assert 'reason="deadline"' in (await client.get("/metrics")).text
            accepted = await client.post("/v1/completions", json=body | {"timeout_s": 11})
            assert accepted.status_code == 200

    asyncio.run(run())


def test_timeout_aborts_a_running_request_and_frees_its_blocks():
    async def run():
        server = GatedServer()
        async with server.running() as client:
            server.runner.gate.clear()
            body = BODIES["/v1/completions"] | {"timeout_s": 3600, "stream": True}
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            await server.reach(lambda: server.replica.scheduler.blocks.pool.num_used_blocks > 0)
            [request_id] = server.engine._requests.by_id
            server.engine._dispatcher.extend_deadline(request_id, server.engine.clock())
            server.runner.gate.set()
            assert '"code":"timeout"' in (await asking).text
            await server.reach(lambda: server.replica.scheduler.blocks.pool.num_used_blocks == 0)
            answer = await client.post("/v1/completions", json=BODIES["/v1/completions"] | {"max_tokens": 3})
            assert answer.json()["choices"][0]["finish_reason"] == "length"

    asyncio.run(run())
