"""Lists that are told a page at a time, as OpenAI's protocol has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request

from llm_serving.errors import RequestError

DEFAULT_ROWS, MAX_ROWS = 20, 100
PAGE: Final[Mapping[str, Mapping[str, Any]]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ROWS},
    "after": {"type": "string"},
}
"""What a URL may say of a page."""


def asked_page(http_request: Request) -> tuple[int, str | None]:
    """Most rows, and the id of the one before the first of them; None: from the beginning."""
    given = http_request.query_params.get("limit", str(DEFAULT_ROWS))
    if not (given.isascii() and given.isdecimal() and len(given) <= 4 and 1 <= int(given) <= MAX_ROWS):
        raise RequestError("limit", f"must be an integer from 1 to {MAX_ROWS}", given)
    return int(given), http_request.query_params.get("after") or None
