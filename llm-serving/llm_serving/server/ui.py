"""The monitoring page at /ui, which needs no API key itself."""

from __future__ import annotations

import hashlib
from http import HTTPStatus
from pathlib import Path
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llm_serving.server.request_context import request_context_of

PATH: Final = "/ui"
FOLDER: Final = Path(__file__).parent / "ui"
FIRST: Final = "index.html"
MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Trusted Types: the browser throws where a script tries to turn a text into an element, a script or a style.
COMMON_POLICY: Final = "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    f"frame-ancestors 'none'; {COMMON_POLICY}"
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """Return a route for each file of the page, read by this call, and a route that redirects from / to the page."""
    files = [
        _route(path, PATH if path.name == FIRST else f"{PATH}/{path.name}")
        for path in sorted(FOLDER.iterdir())
        if path.suffix in MEDIA_TYPES
    ]
    return [*files, Route("/", _lead_to_page)]


async def _lead_to_page(request: Request) -> Response:
    """Redirect a browser to the page, by a relative address, as proxies may add a prefix. Other clients get 405."""
    if "text/html" not in request.headers.get("accept", ""):
        raise HTTPException(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "POST"})
    request_context_of(request).route = PATH
    headers = {"location": PATH.removeprefix("/"), "vary": "accept", "cache-control": "no-cache"}
    return Response(status_code=HTTPStatus.TEMPORARY_REDIRECT, headers=headers)


def _route(path: Path, shown_at: str) -> Route:
    content, media_type = path.read_bytes(), MEDIA_TYPES[path.suffix]
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "etag": etag}

    async def send(request: Request) -> Response:
        request_context_of(request).route = PATH
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return Route(shown_at, send)
