"""Asks the server's own routes, without a connection: on behalf of a tenant whose requests were kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
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
"""Seconds between two looks at an engine that loads."""


class Inside:
    """A client within the process; keys and what they may ask for hold as for those outside.

    Args:
        app: The application behind the check of keys.
        keys: Tenant -> its key; none: keys are not needed.
        quotas: Tenant -> what its key may ask for.
        ready: Whether anything can be computed at this moment; until then nothing is asked.
    """

    def __init__(
        self, app: ASGIApp, keys: Mapping[str, ApiKey], quotas: Mapping[str, Quota], ready: Callable[[], bool]
    ) -> None:
        self._app = app
        self._ready = ready
        self._keys = keys
        self._quotas = quotas

    def reload(self, keys: Mapping[str, ApiKey]) -> None:
        """From now on these are the keys."""
        self._keys = keys

    async def __call__(self, url: str, body: bytes, tenant: str) -> Answered:
        """What POST with this body is answered; a request whose tenant has no key any more is refused."""
        key = self._keys.get(tenant)
        if self._keys and key is None:
            gone = openai_error_response(AuthenticationError("the API key of who asked is not known any more"))
            return Answered(gone.status_code, bytes(gone.body))
        while not self._ready():
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
            QUOTA_KEY: self._quotas.get(tenant),
        }
        exchange = _Exchange(body)
        await self._app(scope, exchange.receive, exchange.send)
        return exchange.answered()


class _Exchange:
    """One request and its answer; it never leaves before."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._start: Message = {}
        self._answer = bytearray()

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        else:
            self._answer += message.get("body", b"")

    def answered(self) -> Answered:
        headers = {name.lower(): value for name, value in self._start["headers"]}
        wait, ignored = headers.get(b"retry-after"), headers.get(IGNORED_HEADER.encode())
        return Answered(
            self._start["status"],
            bytes(self._answer),
            None if wait is None else float(wait),
            None if ignored is None else ignored.decode(),
        )
