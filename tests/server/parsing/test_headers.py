"""Query parameters, headers and bodies that a route does not use: refused by name, or ignored and reported."""

from __future__ import annotations

import pytest
from support.fakes import FakeEngine
from support.server_client import error_of, request


def ask(method, url, **content):
    return request(FakeEngine(max_body_bytes=2**16), method, url, **content)


@pytest.mark.parametrize(
    ("url", "field"),
    [
        ("/v1/timeline?replica=0", "replica"),
        ("/v1/responses/resp_1?stream=true", "stream"),
        ("/v1/files?order=desc", "order"),
        ("/v1/timeline?steps=1&steps=2", "steps"),
        ("/v1/models?%00=1", "\0"),
        ("/v1/models?" + "x" * 4000, "x" * 64),
    ],
)
def test_unknown_query_parameter_is_refused(url, field):
    answer = ask("GET", url)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == field


def test_query_parameters_of_other_servers_are_ignored_and_reported():
    answer = ask("POST", "/v1/completions?api-version=1&beta=true", json={"prompt": "a", "metadata": {"a": "b"}})
    assert answer.status_code == 200
    assert answer.headers["x-ignored-parameters"] == "metadata, api-version, beta"


@pytest.mark.parametrize("name", ["x-request-timeout-s", "Idempotency-Key", "Last-Event-ID"])
def test_duplicate_header_is_refused(name):
    answer = ask("POST", "/v1/completions", json={"prompt": "a"}, headers=[(name, "5"), ("x-other", "1"), (name, "6")])
    assert (answer.status_code, error_of(answer)["param"]) == (400, name.lower())


@pytest.mark.parametrize(
    ("method", "url", "name", "ignored"),
    [
        ("POST", "/v1/completions", "Idempotency-Key", None),
        ("POST", "/v1/completions", "x-request-timeout-s", None),
        ("POST", "/generate", "Idempotency-Key", "idempotency-key"),
        ("POST", "/generate", "Last-Event-ID", "last-event-id"),
        ("GET", "/v1/models", "x-request-timeout-s", "x-request-timeout-s"),
    ],
)
def test_unsupported_header_is_reported(method, url, name, ignored):
    body = {"json": {"inputs" if url == "/generate" else "prompt": "a"}} if method == "POST" else {}
    answer = ask(method, url, headers={name: "50"}, **body)
    assert (answer.status_code, answer.headers.get("x-ignored-parameters")) == (200, ignored)


def test_compressed_body_is_refused():
    answer = ask("POST", "/v1/completions", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "content-encoding")


def test_probes_accept_any_query():
    assert ask("GET", "/health?t=123").status_code == 200
    assert ask("GET", "/metrics?t=123").status_code == 200


@pytest.mark.parametrize("url", ["/v1/reload", "/v1/replicas/0/drain", "/v1/requests/a/cancel"])
@pytest.mark.parametrize(
    ("body", "field"),
    [(b'{"timeout_s": -1}', "timeout_s"), (b"[1]", "body"), (b"{", "body"), (b'{"a": null, "b": 0}', "b")],
)
def test_body_on_a_route_without_body_is_refused(url, body, field):
    answer = ask("POST", url, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == field


@pytest.mark.parametrize("body", [b"", b"{}", b" null ", b'{"a": null}'])
def test_empty_body_is_accepted(body):
    answer = ask("POST", "/v1/requests/a/cancel", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200
