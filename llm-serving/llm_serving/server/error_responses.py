"""Errors as clients of each protocol expect them."""

from __future__ import annotations

import math
import re
from http import HTTPStatus
from typing import Final

from msgspec import json
from starlette.responses import Response

from llm_serving.errors import (
    AuthenticationError,
    CapacityError,
    ContextLengthError,
    GoneError,
    IdempotencyError,
    LLMServingError,
    ModelNotFoundError,
    PermissionDeniedError,
    RateLimitError,
    RequestCancelledError,
    RequestError,
    RequestNotFoundError,
    StoreFullError,
    TimedOutError,
    TooLateError,
    UnavailableError,
)
from llm_serving.server.schemas import ErrorDetail, ErrorResponse

_CODES: tuple[tuple[type[LLMServingError], str, str | None], ...] = (
    (AuthenticationError, "authentication_error", "invalid_api_key"),
    (PermissionDeniedError, "permission_error", None),
    (ModelNotFoundError, "not_found_error", "model_not_found"),
    (RequestNotFoundError, "not_found_error", "request_not_found"),
    (IdempotencyError, "idempotency_error", "idempotency_key_reused"),
    (GoneError, "gone_error", "gone"),
    (RequestCancelledError, "request_cancelled_error", "cancelled"),
    (TimedOutError, "timeout_error", "timeout"),
    (ContextLengthError, "invalid_request_error", "context_length_exceeded"),
    (RequestError, "invalid_request_error", None),
    (RateLimitError, "rate_limit_error", "rate_limit_exceeded"),
    (TooLateError, "rate_limit_error", "deadline"),
    (StoreFullError, "rate_limit_error", "store_full"),
    (CapacityError, "rate_limit_error", "queue_full"),
    (UnavailableError, "service_unavailable_error", "unavailable"),
)
"""(error, type, code) of the OpenAI body; the first that fits."""

FIELD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.\[\]]{0,63}")
UNAVAILABLE_RETRY_AFTER_S = 5.0
RETRY_AFTER_MS_HEADER = "retry-after-ms"
"""Beside `Retry-After`, which has whole seconds: what OpenAI's and Anthropic's libraries wait for."""
PREDICTED_TTFT_HEADER = "x-predicted-ttft-ms"
"""Milliseconds to the first token, as predicted: of a request let in, from the door on; of one refused, from now on if
it is sent again after `Retry-After`."""


def json_response(content: object, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None) -> Response:
    return Response(json.encode(content), status, headers, media_type="application/json")


def openai_error(error: LLMServingError) -> ErrorResponse:
    kind, code = next(((kind, code) for cls, kind, code in _CODES if isinstance(error, cls)), ("server_error", None))
    return ErrorResponse(ErrorDetail(str(error), kind, error.field if isinstance(error, RequestError) else None, code))


def openai_error_response(error: LLMServingError) -> Response:
    """`{"error": {"message", "type", "param", "code"}}` with the status of the error."""
    return json_response(openai_error(error), error.http_status, error_headers(error))


def tgi_error_content(error: LLMServingError) -> dict[str, str]:
    """`{"error", "error_type"}` as text-generation-inference words it."""
    if isinstance(error, RequestError):
        kind = "validation"
    elif isinstance(error, CapacityError | UnavailableError):
        kind = "overloaded"
    elif isinstance(error, RequestCancelledError | TimedOutError):
        kind = "incomplete_generation"
    else:
        kind = "generation"
    return {"error": str(error), "error_type": kind}


def tgi_error_response(error: LLMServingError) -> Response:
    status = HTTPStatus.UNPROCESSABLE_ENTITY if error.http_status == HTTPStatus.BAD_REQUEST else error.http_status
    return json_response(tgi_error_content(error), status, error_headers(error))


def legacy_error_response(error: LLMServingError) -> Response:
    """Malformed requests get 422 and `{"detail": [...]}`; the texts with status 200 are the legacy routes' own."""
    if isinstance(error, RequestError) and error.http_status == HTTPStatus.BAD_REQUEST:
        detail = [{"loc": ["body", *error.field.split(".")], "msg": str(error), "type": "value_error"}]
        return json_response({"detail": detail}, HTTPStatus.UNPROCESSABLE_ENTITY)
    return openai_error_response(error)


def kind_of(error: LLMServingError) -> str:
    """What the logs tell of an error: its class and the field that was wrong, never a text of the client.

    The name of a field may be the client's invention: only one that looks like a name is told.
    """
    field = error.field if isinstance(error, RequestError) else ""
    return f"{type(error).__name__} {field}" if FIELD.fullmatch(field) else type(error).__name__


def error_headers(error: LLMServingError) -> dict[str, str]:
    """What helps the client to go on: when to retry, when its first token is expected then and how long the queue is,
    or how to show a key.

    The connection is closed where the body was not read to the end.
    """
    headers = {}
    if isinstance(error, CapacityError | UnavailableError):
        seconds = getattr(error, "retry_after", None)
        seconds = max(1.0, UNAVAILABLE_RETRY_AFTER_S if seconds is None else seconds)
        headers["retry-after"], headers[RETRY_AFTER_MS_HEADER] = str(math.ceil(seconds)), str(math.ceil(1000 * seconds))
    if isinstance(error, CapacityError) and error.queue_estimate_ms is not None:
        headers["x-queue-estimate-ms"] = str(math.ceil(error.queue_estimate_ms))
    if isinstance(error, CapacityError) and error.predicted_s is not None:
        headers[PREDICTED_TTFT_HEADER] = str(math.ceil(1000 * error.predicted_s))
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = 'Bearer realm="llm-serving"'
    if error.http_status in (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.REQUEST_TIMEOUT):
        headers["connection"] = "close"
    return headers
