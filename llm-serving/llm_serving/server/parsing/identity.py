"""The id of a response and the name of the model that it is asked for."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import ModelNotFoundError, RequestError
from llm_serving.server.request_context import request_context_of

ANY_MODEL: Final = "*"
"""The alias that matches every name."""
REQUEST_ID_HEADER: Final = "x-request-id"
REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


@dataclass(frozen=True)
class ResponseIdentity:
    """The fields that every chunk of one response repeats."""

    id: str
    request_id: str
    created: int
    """Seconds since 1970."""
    model: str

    @property
    def headers(self) -> dict[str, str]:
        return {REQUEST_ID_HEADER: self.request_id}


def identify(engine: AsyncEngine, http_request: Request, request_id: str | None, prefix: str) -> ResponseIdentity:
    """Return the identity of a new response.

    Args:
        engine: Names the served model.
        http_request: Its header `x-request-id` is used where the body has no id; without either the id is random.
        request_id: The field `request_id` of the body.
        prefix: Put before the request id to form the id of the response.

    Raises:
        RequestError: `request_id` is malformed.
    """
    if request_id is not None and not REQUEST_ID.fullmatch(request_id):
        raise RequestError("request_id", "must be 1 to 128 letters, digits or any of . _ : -", request_id)
    if request_id is None:
        request_id = request_id_of(http_request)
    if (note := request_context_of(http_request)) is not None:
        note.request_id = request_id
    return ResponseIdentity(f"{prefix}-{request_id}", request_id, int(time.time()), engine.config.model.model_name)


def request_id_of(http_request: Request) -> str:
    """Return the header `x-request-id` if it is a valid id, otherwise a random id."""
    header = http_request.headers.get(REQUEST_ID_HEADER, "")
    return header if REQUEST_ID.fullmatch(header) else secrets.token_hex(16)


def check_model(engine: AsyncEngine, name: str | None) -> None:
    """Raise ModelNotFoundError unless the name is absent or means the served model."""
    served, aliases = engine.config.model.model_name, engine.config.model.model_aliases
    if name and name != served and name not in aliases and ANY_MODEL not in aliases:
        raise ModelNotFoundError("model", f"must be {served}, the model that is served, or one of its aliases", name)
