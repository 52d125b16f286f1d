"""What a request asks for beside the fields that its route reads: in its URL, its headers, and in a body where none is
read.

As for fields: refused by name, or, where it cannot change an answer, ignored and named. Never silently.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec
from starlette.requests import Request

from llm_serving.config.sections.server import ServerConfig
from llm_serving.errors import RequestError
from llm_serving.server.request_body import read_body

IGNORED: Final = frozenset(("api-version", "beta"))
"""In URLs; clients of other servers send these with every request, and there is but one version here."""
ONCE: Final = frozenset((b"idempotency-key", b"last-event-id", b"x-request-timeout-s"))
MAX_NAME_CHARS: Final = 64
NOTHING: Final = (b"", b"{}", b"null")
_decode: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def check_query(request: Request, known: Collection[str]) -> list[str]:
    """Names of what is ignored in the URL.

    Raises:
        RequestError: There is something else that the route does not know, or the same twice.
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
    """Raises RequestError where a header that asks for something is there twice, or a body is not as it is read."""
    given = _asking(request)
    if len(set(given)) < len(given):
        raise RequestError(max(given, key=given.count), "must be given once")
    if (encoding := request.headers.get("content-encoding", "")) not in ("", "identity"):
        raise RequestError("content-encoding", "must be identity: bodies are read as they come", encoding)


def asked_header(request: Request, name: str) -> str | None:
    """A header that asks for something, by a route that heeds it; None: it is not there."""
    request.state.heeded_headers = (*_heeded(request), name)
    return request.headers.get(name)


def unheeded_headers(request: Request) -> list[str]:
    """Names of those that ask for what the route that answered does not know."""
    return [name for name in _asking(request) if name not in _heeded(request)]


def _asking(request: Request) -> list[str]:
    return [name.decode() for name, _ in request.scope["headers"] if name in ONCE]


def _heeded(request: Request) -> tuple[str, ...]:
    return getattr(request.state, "heeded_headers", ())


async def check_no_body(request: Request, limits: ServerConfig) -> None:
    """Raises RequestError for a body that says something, where none is read."""
    body = (await read_body(request, limits)).strip()
    if body in NOTHING:
        return
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError("body", "must be empty: this route takes none") from None
    for name, value in fields.items():
        if bytes(value) != b"null":
            raise RequestError(name[:MAX_NAME_CHARS], "is not a parameter of this route, which takes no body")
