"""API keys: every route requires one, and accepted requests are unchanged."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

import pytest
from llm_serving.config.tables import ApiKey
from llm_serving.server.app import create_app
from llm_serving.server.generation.events import DONE
from llm_serving.server.middleware import authentication
from llm_serving.server.middleware.authentication import hash_key
from llm_serving.server.routes import ENDPOINTS
from support.fakes import FakeEngine, Script
from support.server_client import error_of, events, post, request

KEY = "sesame-open-the-door"
KEYS = (ApiKey(name="team-a", key_sha256=hash_key(KEY)), ApiKey(name="team-b", key_sha256=hash_key("b" * 20)))
OPEN = ["/health", "/ping"]
CLOSED = [(e.method, e.path.replace("{model:path}", "demo").replace("{name:path}", "demo")) for e in ENDPOINTS]
CLOSED = [(method, path) for method, path in CLOSED if path not in OPEN]


def locked_engine(**arguments: Any) -> FakeEngine:
    return FakeEngine(api_keys=KEYS, **arguments)


def bearer(key: str = KEY) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("method", "path"),
    [*CLOSED, ("GET", "/openapi.json"), ("GET", "/nowhere"), ("GET", "/health/"), ("GET", "/HEALTH")],
)
def test_every_closed_path_requires_a_key(method, path):
    engine = locked_engine()
    response = request(engine, method, path, content=b'{"prompt": "x", "inputs": "x"}')
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == 'Bearer realm="llm-serving"'
    error = error_of(response)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert error["message"].startswith("an API key is needed: send the header `Authorization: Bearer KEY`")
    assert engine.submitted == []


def test_closed_paths_include_the_important_routes():
    paths = [path for _, path in CLOSED]
    assert {"/metrics", "/v1/completions", "/", "/models/demo", "/serving/get_bs", "/info", "/v1/models"} <= set(paths)
    assert len(CLOSED) == len(ENDPOINTS) - len(OPEN)


@pytest.mark.parametrize("path", OPEN)
def test_health_requires_no_key(path):
    assert request(locked_engine(), "GET", path).status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/openapi.json", "/version"])
@pytest.mark.parametrize(
    "headers", [bearer(), {"x-api-key": KEY}, {"Authorization": f"bearer {KEY}"}, {"x-api-key": KEY} | bearer()]
)
def test_known_key_is_accepted_on_every_route(path, headers):
    assert request(locked_engine(), "GET", path, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (bearer("sesame-open-the-doot"), "the API key is not known"),
        ({"x-api-key": "x"}, "the API key is not known"),
        (bearer(hash_key(KEY)), "the API key is not known"),
        (bearer(""), "an API key is needed"),
        ({"authorization": KEY}, "an API key is needed"),
        ({"authorization": f"Basic {KEY}"}, "an API key is needed"),
        (bearer() | {"x-api-key": "b" * 20}, "one API key is needed, not several"),
    ],
)
def test_other_credentials_are_refused(headers, message):
    response = request(locked_engine(), "GET", "/metrics", headers=headers)
    assert response.status_code == 401
    assert error_of(response)["message"].startswith(message)
    assert KEY not in response.text


def test_server_without_keys_requires_none():
    assert request(FakeEngine(), "GET", "/metrics", headers=bearer("anything")).status_code == 200


def test_key_hashes_are_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(expected, digest):
        compared.append((expected, digest))
        return hmac_compare(expected, digest)

    hmac_compare = hmac.compare_digest
    monkeypatch.setattr(authentication.hmac, "compare_digest", compare)
    assert request(locked_engine(), "GET", "/version", headers=bearer()).status_code == 200
    digest = bytes.fromhex(hash_key(KEY))
    assert compared == [(bytes.fromhex(key.key_sha256), digest) for key in KEYS]


def test_authentication_does_not_buffer_streams():
    engine = locked_engine()
    response = post(engine, "/v1/completions", {"prompt": "x", "stream": True}, headers=bearer())
    assert events(response)[-1] == "[DONE]"

    async def first_piece_before_the_last_is_made() -> None:
        held = locked_engine(script=Script(hold_after=1))
        sent: list[Any] = []
        body = [{"type": "http.request", "body": b'{"prompt": "x", "stream": true}', "more_body": False}]
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"x-api-key", KEY.encode())],
        }

        async def receive() -> Any:
            if body:
                return body.pop()
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        task = asyncio.create_task(create_app(held)(scope, receive, send))
        await held.held.wait()
        assert b"Hello" in sent[-1]["body"]
        held.gate.set()
        await task
        assert sent[-1]["body"].endswith(DONE)
        assert sent[-1]["more_body"] is False

    asyncio.run(first_piece_before_the_last_is_made())


def test_websockets_are_closed():
    async def connect() -> list[Any]:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        async def send(message: Any) -> None:
            sent.append(message)

        await create_app(locked_engine())({"type": "websocket", "path": "/health", "headers": []}, receive, send)
        return sent

    assert asyncio.run(connect()) == [{"type": "websocket.close", "code": 1008}]


def test_openapi_document_describes_api_keys():
    document = request(locked_engine(), "GET", "/openapi.json", headers=bearer()).json()
    assert document["security"] == [{"bearer": []}, {"api_key": []}]
    assert set(document["components"]["securitySchemes"]) == {"bearer", "api_key"}
    open_paths = {path for path, entry in document["paths"].items() if entry.get("get", {}).get("security") == []}
    assert open_paths == set(OPEN)
    assert "security" not in request(FakeEngine(), "GET", "/openapi.json").json()
