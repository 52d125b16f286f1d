"""Sends requests to the server's own routes without a connection, in the name of a tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from starlette.types import ASGIApp, Message

from llm_serving.config.tables import ApiKey
from llm_serving.errors import AuthenticationError
from llm_serving.server.batches.runner import Answered
from llm_serving.server.middleware.rate_limits import Quota
from llm_serving.server.parsing.body import IGNORED_HEADER
from llm_serving.server.parsing.errors import openai_error_response
from llm_serving.server.request_context import API_KEY_KEY, QUOTA_KEY

READY_EVERY_S: Final = 0.5


@dataclass(eq=False)
class InternalClient:
    """A client within the process. API keys and rate limits apply to it as to other clients."""

    app: ASGIApp
    keys: Mapping[str, ApiKey]
    quotas: Mapping[str, Quota]
    ready: Callable[[], bool]

    async def __call__(self, url: str, body: bytes, tenant: str) -> Answered:
        """Send a POST and return the response. Its status is 401 if the tenant's key no longer exists."""
        key = self.keys.get(tenant)
        if self.keys and key is None:
            gone = openai_error_response(AuthenticationError("the API key of this tenant no longer exists"))
            return Answered(gone.status_code, bytes(gone.body))
        while not self.ready():
            await asyncio.sleep(READY_EVERY_S)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": url,
            "raw_path": url.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            API_KEY_KEY: key,
            QUOTA_KEY: self.quotas.get(tenant),
        }
        request = _InternalRequest(body)
        await self.app(scope, request.receive, request.send)
        return request.answered()


@dataclass(eq=False)
class _InternalRequest:
    body: bytes | None
    start: Message = field(default_factory=dict)
    answer: bytearray = field(default_factory=bytearray)

    async def receive(self) -> Message:
        if self.body is None:
            await asyncio.Event().wait()
        body, self.body = self.body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
        else:
            self.answer += message.get("body", b"")

    def answered(self) -> Answered:
        headers = {name.lower(): value for name, value in self.start["headers"]}
        wait, ignored = headers.get(b"retry-after"), headers.get(IGNORED_HEADER.encode())
        return Answered(
            self.start["status"],
            bytes(self.answer),
            None if wait is None else float(wait),
            None if ignored is None else ignored.decode(),
        )
