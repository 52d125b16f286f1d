"""Checks of requests from browsers: only the server's own pages and those of configured origins may send requests.

A browser sends requests of any web page to any address it can reach, such as the loopback address. If no API keys are
needed, three headers reveal such requests: `Origin`; `Host`, if an attacker's domain resolves to this machine (DNS
rebinding); and `Sec-Fetch-Site`, for images and scripts, which are requested without an `Origin`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from llm_serving.config.sections.server import ServerConfig, is_loopback
from llm_serving.errors import PermissionDeniedError
from llm_serving.server.idempotency.request import REPLAYED_HEADER, STREAM_ID_HEADER
from llm_serving.server.parsing.body import IGNORED_HEADER
from llm_serving.server.parsing.errors import (
    PREDICTED_TTFT_HEADER,
    RETRY_AFTER_MS_HEADER,
    kind_of,
    openai_error_response,
)
from llm_serving.server.request_context import request_context_of

FOREIGN_SITES: Final = (b"cross-site", b"same-site")
"""Values of `Sec-Fetch-Site` for pages of other sites, and for other ports or machines of the same domain."""
METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE")
SHOWN_HEADERS: Final = (
    "retry-after",
    RETRY_AFTER_MS_HEADER,
    "x-queue-estimate-ms",
    "x-request-id",
    "request-id",
    IGNORED_HEADER,
    STREAM_ID_HEADER,
    REPLAYED_HEADER,
    PREDICTED_TTFT_HEADER,
    *(f"x-ratelimit-{each}-{of}" for each in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)


class BrowserGuard:
    """ASGI middleware that answers CORS preflights. If no API keys are needed, it refuses requests of foreign pages."""

    def __init__(self, app: ASGIApp, server: ServerConfig, *, needs_keys: bool, refused: Callable[[str], None]) -> None:
        self._app = app
        self._origins = frozenset(server.cors_origins)
        self._cors = CORSMiddleware(
            app,
            allow_origins=server.cors_origins,
            allow_methods=METHODS,
            allow_headers=("*",),
            expose_headers=SHOWN_HEADERS,
        )
        self._needs_keys = needs_keys
        self._hosts: frozenset[str] | None = None
        """Accepted hosts. None accepts all, because keys are required or the server is not on loopback."""
        if not needs_keys and is_loopback(server.server_ip):
            self._hosts = frozenset(("localhost", "127.0.0.1", *map(str.lower, server.allowed_hosts)))
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = request_context_of(HTTPConnection(scope)).headers
        host = headers[b"host"].decode("latin-1").lower() if b"host" in headers else None
        origin = headers[b"origin"].decode("latin-1") if b"origin" in headers else None
        try:
            if self._hosts is not None and host is not None:
                self._check_host(host, self._hosts)
            if origin is not None and self._origins.isdisjoint((origin, "*")):
                self._check_origin(origin, host)
                origin = None
            elif origin is None and b"sec-fetch-site" in headers:
                self._check_site(headers)
        except PermissionDeniedError as error:
            request_context_of(HTTPConnection(scope)).error = kind_of(error)
            await openai_error_response(error)(scope, receive, send)
            return
        await (self._app if origin is None else self._cors)(scope, receive, send)

    def _check_host(self, host: str, allowed: Collection[str]) -> None:
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].rstrip(".")
        if not (name in allowed or is_loopback(name)):
            self._refused("foreign_host")
            rule = "must be this machine's or one of serving_config.allowed_hosts, because the server needs no API key"
            raise PermissionDeniedError("Host", rule, host)

    def _check_origin(self, origin: str, host: str | None) -> None:
        own = origin.lower().partition("://")[2]
        if self._needs_keys or (own and own == host):
            return
        self._refused("foreign_origin")
        rule = "must be the server's or one of serving_config.cors_origins, because the server needs no API key"
        raise PermissionDeniedError("Origin", rule, origin)

    def _check_site(self, fetched: Mapping[bytes, bytes]) -> None:
        """Raise PermissionDeniedError if another site's page embeds a resource of this server. Links are allowed."""
        if self._needs_keys or "*" in self._origins or fetched.get(b"sec-fetch-dest") == b"document":
            return
        if (site := fetched.get(b"sec-fetch-site")) in FOREIGN_SITES:
            self._refused("foreign_origin")
            rule = "must be same-origin or none if there is no header `Origin`, because the server needs no API key"
            raise PermissionDeniedError("Sec-Fetch-Site", rule, site.decode())
