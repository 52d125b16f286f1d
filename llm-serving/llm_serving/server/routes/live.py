"""GET /v1/live: the schedulers as they go, as server-sent events."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.server.authentication import tenant_seen
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.live_feed import LiveFeed
from llm_serving.server.live_view import columns_event
from llm_serving.server.streaming import EVENT_STREAM, STREAM_HEADERS, ClientGoneError, run_until_client_leaves


async def watch(engine: AsyncEngine, http_request: Request) -> Response:
    """Pictures of all schedulers, a few a second, until the client leaves; of other tenants only numbers."""
    return _LiveResponse(http_request.app.live, tenant_seen(http_request))


class _LiveResponse(Response):
    """Sends the newest picture whenever the client has taken the one before."""

    def __init__(self, feed: LiveFeed, tenant: str | None) -> None:
        self._feed = feed
        self._viewer = feed.join(tenant)
        self.status_code = 200
        self.media_type = EVENT_STREAM
        self.background = None
        self.init_headers(STREAM_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._with_body = scope["method"] != "HEAD"
        try:
            with contextlib.suppress(ClientGoneError):
                await run_until_client_leaves(receive, self._send_all(send))
        finally:
            self._feed.leave(self._viewer)

    async def _send_all(self, send: Callable[[Message], Awaitable[None]]) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": columns_event(), "more_body": True})
        # To a HEAD this is all: its client takes no body, and need not leave.
        while self._with_body and (picture := await self._viewer.next()) is not None:
            await send({"type": "http.response.body", "body": picture, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


ENDPOINTS: Final = (Endpoint("GET", "/v1/live", watch, "Watch the schedulers, as server-sent events without an end"),)
