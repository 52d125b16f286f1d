"""Checks of query parameters, headers, and bodies of routes that read none.

As with fields of bodies, an unsupported one is refused by name or, if it cannot change a response, ignored and named in
a header of the response.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec
from starlette.requests import Request

from llm_serving.config.sections.server import ServerConfig
from llm_serving.errors import RequestError
from llm_serving.server.parsing.body import read_body

IGNORED: Final = frozenset(("api-version", "beta"))
"""Query parameters that clients of other servers send with every request."""
CHECKED_HEADERS: Final = frozenset((b"idempotency-key", b"last-event-id", b"x-request-timeout-s"))
MAX_NAME_CHARS: Final = 64
EMPTY_BODIES: Final = (b"", b"{}", b"null")
_decode: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def check_query(request: Request, known: Collection[str]) -> list[str]:
    """Return the names of the query parameters that are ignored.

    Raises:
        RequestError: A parameter is unknown to the route, or given twice.
    """
    if not request.scope.get("query_string"):
        return []
    ignored, seen = [], set()
    for name, value in request.query_params.multi_items():
        if name in IGNORED:
            ignored.append(name)
        elif name not in known:
            raise RequestError(name[:MAX_NAME_CHARS], "is not a parameter of this route's URL")
        elif name in seen:
            raise RequestError(name, "must be given once", value)
        seen.add(name)
    return ignored


def check_headers(request: Request) -> None:
    """Raise RequestError where a checked header is given twice, or the body is compressed."""
    given = _checked_headers(request)
    if len(set(given)) < len(given):
        raise RequestError(max(given, key=given.count), "must be given once")
    if (encoding := request.headers.get("content-encoding", "")) not in ("", "identity"):
        raise RequestError("content-encoding", "must be identity: bodies are read as they come", encoding)


def read_header(request: Request, name: str) -> str | None:
    """Return a checked header for a route that supports it; None: it is absent."""
    request.state.read_headers = (*_read_so_far(request), name)
    return request.headers.get(name)


def ignored_headers(request: Request) -> list[str]:
    """Return the names of the checked headers that the route has not read."""
    return [name for name in _checked_headers(request) if name not in _read_so_far(request)]


def _checked_headers(request: Request) -> list[str]:
    return [name.decode() for name, _ in request.scope["headers"] if name in CHECKED_HEADERS]


def _read_so_far(request: Request) -> tuple[str, ...]:
    return getattr(request.state, "read_headers", ())


async def check_no_body(request: Request, limits: ServerConfig) -> None:
    """Raise RequestError for a body that is not empty, on a route that reads none."""
    body = (await read_body(request, limits)).strip()
    if body in EMPTY_BODIES:
        return
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError("body", "must be empty: this route takes none") from None
    for name, value in fields.items():
        if bytes(value) != b"null":
            raise RequestError(name[:MAX_NAME_CHARS], "is not a parameter of this route, which takes no body")
