"""The page at /ui: files of the package, sent as they are to whoever asks; what it shows comes from routes, by key."""

from __future__ import annotations

import hashlib
from http import HTTPStatus
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llm_serving.server.note import note_of

PATH: Final = "/ui"
FOLDER: Final = Path(__file__).parent / "ui"
FIRST: Final = "index.html"
MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # A text can become an element, a script or a style nowhere: the browser throws where code tries.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
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
    """One for each file, read once: no path of a client is ever opened."""
    return [
        _route(path, PATH if path.name == FIRST else f"{PATH}/{path.name}")
        for path in sorted(FOLDER.iterdir())
        if path.suffix in MEDIA_TYPES
    ]


def _route(path: Path, shown_at: str) -> Route:
    content, media_type = path.read_bytes(), MEDIA_TYPES[path.suffix]
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "etag": etag}

    async def send(request: Request) -> Response:
        if (note := note_of(request)) is not None:
            note.route = PATH
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return Route(shown_at, send)
