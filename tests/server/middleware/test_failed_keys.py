"""Unknown API keys are limited, counted and logged within bounds; known keys are not affected."""

from __future__ import annotations

import logging

import pytest
from llm_serving.config.tables import ApiKey
from llm_serving.errors import RateLimitError
from llm_serving.server.middleware import authentication
from llm_serving.server.middleware.authentication import (
    LOG_INTERVAL_S,
    MAX_ADDRESSES,
    WRONG_KEYS_PER_MINUTE,
    FailedKeys,
    hash_key,
)
from support.fakes import FakeEngine
from support.server_client import error_of, request

KEY = "k" * 20


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def reasons():
    return []


@pytest.fixture
def keys(clock, reasons):
    return FailedKeys(clock, reasons.append)


def fail(keys: FailedKeys, client: str, times: int = WRONG_KEYS_PER_MINUTE) -> None:
    for _ in range(times):
        keys.check(client, b"wrong")
        keys.failed(client, shown=True)


def test_unknown_keys_are_limited_per_address(keys, clock, reasons):
    fail(keys, "192.0.2.1")
    with pytest.raises(RateLimitError) as refused:
        keys.check("192.0.2.1", b"perhaps right")
    assert refused.value.retry_after == pytest.approx(60 / WRONG_KEYS_PER_MINUTE)
    assert reasons == ["unknown_key"] * WRONG_KEYS_PER_MINUTE + ["too_many_unknown_keys"]
    keys.check("192.0.2.2", b"wrong")
    clock.now += 60 / WRONG_KEYS_PER_MINUTE
    fail(keys, "192.0.2.1", 1)
    with pytest.raises(RateLimitError):
        keys.check("192.0.2.1", b"wrong")


def test_known_key_works_beside_failed_attempts(keys):
    keys.succeeded("192.0.2.1", b"right")
    fail(keys, "192.0.2.1")
    keys.check("192.0.2.1", b"right")
    with pytest.raises(RateLimitError):
        keys.check("192.0.2.1", b"wrong")
    with pytest.raises(RateLimitError):
        fail(keys, "192.0.2.9", WRONG_KEYS_PER_MINUTE + 1)


def test_ipv6_addresses_of_one_network_count_as_one(keys):
    fail(keys, "2001:db8::1")
    with pytest.raises(RateLimitError):
        keys.check("2001:db8::ffff:1", b"wrong")
    keys.check("2001:db8:0:1::1", b"wrong")
    fail(keys, "::ffff:192.0.2.1")
    with pytest.raises(RateLimitError):
        keys.check("192.0.2.1", b"wrong")
    fail(keys, "testclient")


def test_failed_keys_memory_is_bounded(keys):
    for number in range(3 * MAX_ADDRESSES):
        keys.failed(f"10.0.{number // 256}.{number % 256}", shown=True)
        keys.succeeded(f"10.0.{number // 256}.{number % 256}", b"right")
    assert len(keys._addresses) == len(keys._succeeded) == MAX_ADDRESSES


def test_failed_keys_log_is_rate_limited(keys, clock, monkeypatch):
    lines = []
    monkeypatch.setattr(authentication.logger, "warning", lambda form, *values: lines.append(form % values))
    for _ in range(3000):
        keys.failed("192.0.2.1", shown=True)
        clock.now += 0.001
    assert lines == ["1 requests without a known API key were refused; the last one came from 192.0.2.1"]
    clock.now += LOG_INTERVAL_S
    keys.failed("192.0.2.7", shown=False)
    assert lines[1:] == ["3000 requests without a known API key were refused; the last one came from 192.0.2.7"]


def test_limited_address_gets_retry_after_and_is_counted(monkeypatch):
    engine = FakeEngine(api_keys=(ApiKey(name="team-a", key_sha256=hash_key(KEY)),))
    monkeypatch.setattr(engine, "clock", Clock())
    from llm_serving.server import app

    application = app.create_app(engine)
    monkeypatch.setattr("support.server_client.create_app", lambda _: application)
    logging.getLogger(authentication.logger.name)
    wrong = [request(engine, "GET", "/version", headers={"x-api-key": "x"}) for _ in range(WRONG_KEYS_PER_MINUTE + 1)]
    assert [response.status_code for response in wrong] == [401] * WRONG_KEYS_PER_MINUTE + [429]
    assert wrong[-1].headers["retry-after"] == "3"
    assert error_of(wrong[-1])["code"] == "rate_limit_exceeded"
    metrics = engine.metrics.render()[0].decode()
    assert f'http_refusals_total{{model_name="demo",reason="unknown_key"}} {WRONG_KEYS_PER_MINUTE}.0' in metrics
    assert 'http_refusals_total{model_name="demo",reason="too_many_unknown_keys"} 1.0' in metrics
