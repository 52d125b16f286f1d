"""The id, headers and query parameters of a request. Unsupported ones are refused, or reported as ignored."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection
from typing import Final, NamedTuple

from starlette.requests import Request

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.server.request_context import request_context_of

IGNORED: Final = frozenset(("api-version", "beta"))
"""Query parameters that clients of other servers send with every request."""
CHECKED_HEADERS: Final = frozenset(
    (b"idempotency-key", b"last-event-id", b"x-priority", b"x-request-class", b"x-request-timeout-s")
)
MAX_NAME_CHARS: Final = 64
REQUEST_ID_HEADER: Final = "x-request-id"
_RAW_REQUEST_ID: Final = REQUEST_ID_HEADER.encode()
REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


def check_query(request: Request, known: Collection[str]) -> list[str]:
    """Return the query's names in `IGNORED`. Raise RequestError if another name is not in `known` or occurs twice."""
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


def query_integer(request: Request, name: str, default: int, most: int, key: str = "") -> int:
    """Return an integer query parameter. Raise RequestError unless it is an integer from 1 to `most`. If a
    configuration key sets this maximum, `key` is its name, and the error shows it.
    """
    given = request.query_params.get(name, str(default))
    if not (given.isascii() and given.isdecimal() and len(given) < 10 and 1 <= int(given) <= most):
        raise RequestError(name, f"must be an integer from 1 to {most}{key and f' ({key})'}", given)
    return int(given)


def check_headers(request: Request) -> list[str]:
    """Return which of `CHECKED_HEADERS` a request has. Raise RequestError for a repeated one or a compressed body."""
    headers = request_context_of(request).headers
    if CHECKED_HEADERS.isdisjoint(headers) and b"content-encoding" not in headers:
        return []
    given: list[str] = []
    encoding: str | None = None
    for name, value in request.scope["headers"]:
        if name in CHECKED_HEADERS:
            given.append(name.decode())
        elif name == b"content-encoding" and encoding is None:
            encoding = value.decode("latin-1")
    if len(set(given)) < len(given):
        raise RequestError(max(given, key=given.count), "must be given once")
    if encoding not in (None, "", "identity"):
        raise RequestError("content-encoding", "must be identity: the server decompresses no bodies", encoding)
    return given


def read_header(request: Request, name: str) -> str | None:
    """Return a header of `CHECKED_HEADERS`, or None. `ignored_headers` does not report headers that were read."""
    context = request_context_of(request)
    value = context.headers.get(name.encode())
    if value is None:
        return None
    context.read_headers += (name,)
    return value.decode("latin-1")


def ignored_headers(request: Request, given: Collection[str]) -> list[str]:
    read = request_context_of(request).read_headers
    return [name for name in given if name not in read]


class ResponseIdentity(NamedTuple):
    id: str
    request_id: str
    created: int
    model: str

    @property
    def headers(self) -> dict[str, str]:
        return {REQUEST_ID_HEADER: self.request_id}


def identify(engine: AsyncEngine, http_request: Request, request_id: str | None, prefix: str) -> ResponseIdentity:
    """Return the identity of a response. Its request id is `request_id` from the body, else the header `x-request-id`,
    else random. The id of the response is `prefix` and the request id. Raise RequestError if `request_id` is malformed.
    """
    if request_id is None:
        request_id = request_id_of(http_request)
    elif not REQUEST_ID.fullmatch(request_id):
        raise RequestError("request_id", "must be 1 to 128 letters, digits or any of . _ : -", request_id)
    request_context_of(http_request).request_id = request_id
    return ResponseIdentity(f"{prefix}-{request_id}", request_id, int(time.time()), engine.config.model.model_name)


def request_id_of(http_request: Request) -> str:
    header = request_context_of(http_request).headers.get(_RAW_REQUEST_ID, b"").decode("latin-1")
    return header if REQUEST_ID.fullmatch(header) else secrets.token_hex(16)
