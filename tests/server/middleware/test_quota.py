"""Rate limits of one key: requests and tokens a minute."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from llm_serving.config.tables import ApiKey
from llm_serving.core.sampling_params import BeamSearchParams, SamplingParams
from llm_serving.errors import RateLimitError
from llm_serving.server.app import create_app
from llm_serving.server.generation.generation import submit
from llm_serving.server.generation.sampling import Choices
from llm_serving.server.middleware.authentication import hash_key
from llm_serving.server.middleware.rate_limits import Quota, TokenBucket
from llm_serving.server.parsing.caller import HttpCaller
from support.fakes import FULL_QUEUE, FakeEngine
from support.server_client import error_of, events, post, request

KEY = "k" * 20
HEADERS = {"authorization": f"Bearer {KEY}"}
BODIES = {
    "/v1/completions": {"prompt": [1, 2, 3, 4], "max_tokens": 36},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20},
    "/generate": {"inputs": "x", "parameters": {"max_new_tokens": 20}},
    "/models/demo": {"inputs": "x", "parameters": {"max_new_tokens": 20}},
    "/tokenize": {"prompt": "x"},
}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def limited(monkeypatch):
    """Create an engine and its application, for a key with limits."""

    def make(**limits):
        engine = FakeEngine(api_keys=(ApiKey(name="team-a", key_sha256=hash_key(KEY), **limits),), num_waiting=0)
        monkeypatch.setattr(engine, "clock", Clock())
        application = create_app(engine)
        monkeypatch.setattr("support.server_client.create_app", lambda _: application)
        return engine

    return make


def test_token_bucket_refills_and_may_be_negative():
    bucket = TokenBucket(60, 0.0)
    assert bucket.wait_s(60, 0.0) == 0.0
    bucket.take(90, 0.0)
    assert (bucket.level(0.0), bucket.wait_s(1, 0.0)) == (-30.0, 31.0)
    assert bucket.wait_s(1000, 0.0) == 90.0, "of more than it holds it must be full"
    bucket.take(-20, 10.0)
    assert bucket.level(10.0) == 0.0
    assert bucket.level(1000.0) == 60.0


def test_unused_tokens_are_refunded_to_a_reloaded_limit():
    key, clock = ApiKey(name="a", key_sha256=hash_key(KEY), max_tokens_per_minute=60), Clock()
    quota = Quota(key, clock)
    on_end = quota.take_tokens(10, 5000)
    quota.reload(replace(key, max_tokens_per_minute=120))
    on_end(20)
    assert quota.headers()["x-ratelimit-remaining-tokens"] == "30"
    on_end = quota.take_tokens(20, 5)
    quota.reload(replace(key, max_tokens_per_minute=None, max_requests_per_minute=1))
    on_end(0)
    assert "x-ratelimit-limit-tokens" not in quota.headers()


@pytest.mark.parametrize("path", BODIES)
def test_requests_beyond_the_limit_get_retry_after(limited, path):
    engine = limited(max_requests_per_minute=2)
    for left in (1, 0):
        response = post(engine, path, BODIES[path], headers=HEADERS)
        assert response.status_code == 200
        assert response.headers["x-ratelimit-limit-requests"] == "2"
        assert response.headers["x-ratelimit-remaining-requests"] == str(left)
    assert response.headers["x-ratelimit-reset-requests"] == "60.000s"
    refused = post(engine, path, BODIES[path], headers=HEADERS)
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "30"
    assert "api_keys.team-a.max_requests_per_minute" in refused.text
    num_submitted = len(engine.submitted)
    assert num_submitted == (0 if path == "/tokenize" else 2)
    engine.clock.now += 30
    assert post(engine, path, BODIES[path], headers=HEADERS).status_code == 200
    assert request(engine, "GET", "/health", headers=HEADERS).status_code == 200


def test_tokens_are_withdrawn_at_admission_and_refunded_at_the_end(limited):
    engine = limited(max_tokens_per_minute=100)
    response = post(engine, "/v1/completions", BODIES["/v1/completions"], headers=HEADERS)
    assert response.status_code == 200
    assert response.headers["x-ratelimit-limit-tokens"] == "100"
    used = 4 + response.json()["usage"]["completion_tokens"]
    assert used == 7
    assert post(engine, "/v1/completions", BODIES["/v1/completions"], headers=HEADERS).status_code == 200
    assert len(engine.submitted) == 2


def test_unused_tokens_are_refunded():
    clock = Clock()
    quota = Quota(ApiKey(name="a", key_sha256="", max_tokens_per_minute=100), clock)
    give_back = quota.take_tokens(20, 60)
    assert quota.headers()["x-ratelimit-remaining-tokens"] == "20"
    with pytest.raises(RateLimitError, match=r"30 more would exceed 100 tokens a minute .*; 20 remain") as refused:
        quota.take_tokens(10, 20)
    assert refused.value.retry_after == pytest.approx(6.0)
    give_back(5)
    assert quota.headers()["x-ratelimit-remaining-tokens"] == "75"
    clock.now += 60
    give_back = quota.take_tokens(500, 500)
    with pytest.raises(RateLimitError) as refused:
        quota.take_tokens(1, 0)
    assert refused.value.retry_after == pytest.approx(901 / 100 * 60), "larger than a minute's, it is paid all the same"
    give_back(0)
    assert quota.headers()["x-ratelimit-remaining-tokens"] == "0"
    assert quota.headers()["x-ratelimit-reset-tokens"] == "300.000s"


def test_refused_request_withdraws_no_tokens(limited):
    engine = limited(max_tokens_per_minute=100)
    engine.refusal = FULL_QUEUE
    refused = post(engine, "/v1/completions", {"prompt": [1] * 60, "max_tokens": 30}, headers=HEADERS)
    assert error_of(refused)["code"] == "queue_full"
    assert refused.headers["x-ratelimit-remaining-tokens"] == "100"


def test_every_sequence_counts_against_the_quota(limited):
    engine = limited(max_tokens_per_minute=100)
    body = {"prompt": [[1, 2], [3, 4]], "n": 3, "max_tokens": 30, "temperature": 1.0}
    assert post(engine, "/v1/completions", body, headers=HEADERS).status_code == 200, "larger than the limit: once"
    engine.clock.now += 3.0
    refused = post(engine, "/v1/completions", {"prompt": [1] * 60, "max_tokens": 60}, headers=HEADERS)
    assert refused.status_code == 429
    assert error_of(refused)["code"] == "rate_limit_exceeded"
    assert "120 more would exceed 100 tokens a minute (api_keys.team-a.max_tokens_per_minute)" in refused.text
    assert engine.aborted == []


def test_every_beam_counts_against_the_quota(limited):
    limited(max_tokens_per_minute=100)
    body = {"prompt": [1, 2, 3, 4], "use_beam_search": True, "best_of": 8, "n": 1, "max_tokens": 10, "temperature": 0}
    response = post(None, "/v1/completions", body, headers=HEADERS)
    assert response.json()["usage"]["completion_tokens"] == 3
    assert response.headers["x-ratelimit-remaining-tokens"] == str(100 - 4 - 8 * 3)


def test_aborted_beam_search_gets_no_refund():
    engine = FakeEngine()
    caller = HttpCaller(quota=Quota(ApiKey(name="a", key_sha256="", max_tokens_per_minute=100), Clock()))
    choices = Choices(best_of=4, beams=BeamSearchParams(width=4, num_returned=1))

    async def leave():
        sampling = SamplingParams(max_tokens=10)
        generation = await submit(engine, caller, [[1]], sampling, choices=choices, request_id="a")
        await generation.aclose()

    asyncio.run(leave())
    assert caller.quota.headers()["x-ratelimit-remaining-tokens"] == str(100 - 1 - 4 * 10)
    assert engine.aborted == ["a"]


def test_stream_has_quota_headers_and_a_refund(limited):
    engine = limited(max_tokens_per_minute=100, max_requests_per_minute=5)
    for _ in range(5):
        response = post(engine, "/v1/completions", BODIES["/v1/completions"] | {"stream": True}, headers=HEADERS)
        assert events(response)[-1] == "[DONE]"
        assert response.headers["x-ratelimit-remaining-tokens"].isdecimal()


def test_key_without_limits_has_no_quota_headers(limited):
    response = post(limited(), "/v1/completions", BODIES["/v1/completions"], headers=HEADERS)
    assert not [name for name in response.headers if name.startswith("x-ratelimit")]


def test_every_request_counts_against_the_request_limit(limited):
    engine = limited(max_requests_per_minute=3)
    for _ in range(3):
        answer = request(engine, "GET", "/v1/models", headers=HEADERS)
        assert answer.status_code == 200
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    for path in ("/v1/models", "/metrics", "/v1/timeline", "/v1/requests/x/explain"):
        assert request(engine, "GET", path, headers=HEADERS).status_code == 429
    assert request(engine, "GET", "/health", headers=HEADERS).status_code == 200
