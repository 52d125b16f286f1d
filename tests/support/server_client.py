"""Requests to the ASGI application without a network."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from llm_serving.server.app import create_app
from support.fakes import FakeEngine


def request(engine: FakeEngine, method: str, path: str, **arguments: Any) -> httpx.Response:
    """Send a request; return its complete answer."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **arguments)

    return asyncio.run(send())


def post(engine: FakeEngine, path: str, body: Any = None, **arguments: Any) -> httpx.Response:
    """Send a POST; a body of bytes is sent as it is, others as JSON."""
    if isinstance(body, bytes):
        return request(engine, "POST", path, content=body, **arguments)
    return request(engine, "POST", path, json=body, **arguments)


def events(response: httpx.Response) -> list[Any]:
    """Return the data of server-sent events, parsed if they are JSON."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data:") for block in blocks)
    texts = [block.removeprefix("data:").strip() for block in blocks]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def named_events(response: httpx.Response) -> list[tuple[str, Any]]:
    """Return (name, data) of named server-sent events."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    pairs = [block.split("\n") for block in blocks]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert set(response.json()) == {"error"}
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response.json()["error"]


class RawClient:
    """An ASGI client that can disconnect at any moment."""

    def __init__(self, engine: FakeEngine, path: str, body: Any) -> None:
        self._app = create_app(engine)
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [],
            "scheme": "http",
            "server": ("server", 80),
            "client": ("client", 1),
            "root_path": "",
        }
        self._body: bytes | None = json.dumps(body).encode()
        self._left = asyncio.Event()
        self.messages: list[Any] = []

    def leave(self) -> None:
        self._left.set()

    async def run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.messages.append(message)


def leave_while_held(engine: FakeEngine, path: str, body: Any) -> list[Any]:
    """Send a request, disconnect while the engine holds it, and return the messages sent before."""

    async def run() -> list[Any]:
        client = RawClient(engine, path, body)
        task = asyncio.create_task(client.run())
        await engine.held.wait()
        client.leave()
        await task
        return client.messages

    return asyncio.run(run())
