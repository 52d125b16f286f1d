"""Requests of browsers: of the server's own pages, of configured origins, and of foreign pages."""

from __future__ import annotations

import pytest
from llm_serving.config.tables import ApiKey
from llm_serving.server.middleware.authentication import hash_key
from support.fakes import FakeEngine, Script
from support.server_client import error_of, events, post, request

PAGE = "https://chat.example.com"
COMPLETIONS = "/v1/completions"
FORM = b'{"prompt": "x", "user": "="}'
KEY = "k" * 20
KEYS = (ApiKey(name="team-a", key_sha256=hash_key(KEY)),)
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}


def form_of(origin: str, engine: FakeEngine, **headers: str):
    """Return a form with `enctype=text/plain`, which a browser sends to another site without a preflight."""
    return post(engine, COMPLETIONS, FORM, headers={"content-type": "text/plain", "origin": origin} | headers)


@pytest.mark.parametrize(
    "origin", [PAGE, "null", "http://localhost:3000", "https://localhost.evil.example", "http://evil/localhost", "x"]
)
def test_foreign_origin_is_refused_without_keys(origin):
    engine = FakeEngine()
    response = form_of(origin, engine)
    assert response.status_code == 403
    assert error_of(response)["param"] == "Origin"
    assert "serving_config.cors_origins" in response.text
    assert engine.submitted == []
    assert 'http_refusals_total{model_name="demo",reason="foreign_origin"} 1.0' in engine.metrics.render()[0].decode()


@pytest.mark.parametrize("origin", ["null", "x", "http://"])
def test_null_origin_does_not_match_a_missing_host(origin):
    assert form_of(origin, FakeEngine(limits={"server_ip": "0.0.0.0"}), host="").status_code == 403


def fetched(engine: FakeEngine, site: str, dest: str) -> int:
    """Return the headers that a browser sends for an image or a link; they have no origin."""
    return request(
        engine, "GET", "/version", headers={"sec-fetch-site": site, "sec-fetch-dest": dest, "host": "localhost"}
    ).status_code


@pytest.mark.parametrize("server_ip", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize(
    ("site", "dest", "status"),
    [
        ("cross-site", "image", 403),
        ("cross-site", "iframe", 403),
        ("cross-site", "empty", 403),
        ("same-site", "script", 403),
        ("cross-site", "document", 200),
        ("same-origin", "image", 200),
        ("none", "document", 200),
    ],
)
def test_cross_site_resource_is_refused_without_keys(server_ip, site, dest, status):
    engine = FakeEngine(limits={"server_ip": server_ip})
    assert fetched(engine, site, dest) == status
    assert fetched(FakeEngine(limits={"cors_origins": ("*",)}), site, dest) == 200
    assert fetched(FakeEngine(api_keys=KEYS), site, dest) == 401


@pytest.mark.parametrize(
    ("origin", "host"), [("http://localhost:8835", "localhost:8835"), ("http://127.0.0.1:1", "127.0.0.1:1")]
)
def test_own_pages_and_programs_are_accepted(origin, host):
    engine = FakeEngine()
    assert form_of(origin, engine, host=host).status_code == 200
    assert post(engine, COMPLETIONS, FORM).status_code == 200
    assert len(engine.submitted) == 2


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8835", "127.0.0.1.evil.example", "localhost.evil", ""])
def test_foreign_host_header_is_refused_on_loopback(host):
    """DNS rebinding: to the browser the page and the server are one site."""
    engine = FakeEngine()
    for response in (
        form_of(f"http://{host}", engine, host=host),
        request(engine, "GET", "/metrics", headers={"host": host}),
    ):
        assert response.status_code == 403
        assert error_of(response)["param"] == "Host"
    assert engine.submitted == []


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:80", "localhost.", "127.0.0.1", "127.8.8.8:1", "[::1]:8835", "proxy.lan", "Proxy.lan:80"],
)
def test_loopback_and_allowed_hosts_are_accepted(host):
    engine = FakeEngine(limits={"allowed_hosts": ("Proxy.lan",)})
    assert request(engine, "GET", "/version", headers={"host": host}).status_code == 200


def test_any_host_is_accepted_with_keys_or_a_public_address():
    public = FakeEngine(limits={"server_ip": "0.0.0.0"})
    assert request(public, "GET", "/version", headers={"host": "llm.example"}).status_code == 200
    assert form_of(PAGE, public, host="llm.example").status_code == 403
    locked = FakeEngine(api_keys=KEYS)
    assert form_of(PAGE, locked, host="llm.example").status_code == 401
    response = form_of(PAGE, locked, host="llm.example", authorization=f"Bearer {KEY}")
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("keys", [(), KEYS])
@pytest.mark.parametrize("origins", [(PAGE, "null"), ("*",)])
def test_configured_origin_may_send_and_read(keys, origins):
    engine = FakeEngine(api_keys=keys, limits={"cors_origins": origins})
    preflight = request(engine, "OPTIONS", COMPLETIONS, headers=PREFLIGHT)
    assert preflight.status_code == 200, "it carries no key"
    assert preflight.headers["access-control-allow-origin"] in (PAGE, "*")
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert preflight.headers["access-control-allow-headers"] == "content-type"
    sent = {"origin": PAGE, "authorization": f"Bearer {KEY}", "sec-fetch-site": "cross-site", "sec-fetch-dest": "empty"}
    asked = post(engine, COMPLETIONS, {"prompt": "x"}, headers=sent)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] in (PAGE, "*")
    shown = asked.headers["access-control-expose-headers"].split(", ")
    assert {"retry-after", "x-ignored-parameters", "x-predicted-ttft-ms", "x-request-id"} <= set(shown)
    assert {"x-stream-id", "idempotent-replayed"} <= set(shown)
    assert "access-control-allow-credentials" not in asked.headers


def test_errors_are_readable_by_a_configured_origin():
    engine = FakeEngine(api_keys=KEYS, limits={"cors_origins": (PAGE,)})
    response = post(engine, COMPLETIONS, {"prompt": "x"}, headers={"origin": PAGE})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize("keys", [(), KEYS])
def test_preflight_of_a_foreign_origin_is_refused(keys):
    engine = FakeEngine(api_keys=keys, limits={"cors_origins": ("https://other.example",)})
    response = request(engine, "OPTIONS", COMPLETIONS, headers=PREFLIGHT)
    assert response.status_code in (401, 403)
    assert "access-control-allow-origin" not in response.headers


def test_cors_does_not_change_streams():
    body = {"prompt": "x", "stream": True, "seed": 1, "request_id": "a"}
    engine = FakeEngine(script=Script(), limits={"cors_origins": (PAGE,)})
    response = post(engine, COMPLETIONS, body, headers={"origin": PAGE})
    assert response.headers["access-control-allow-origin"] == PAGE
    assert events(response)[-1] == "[DONE]"
