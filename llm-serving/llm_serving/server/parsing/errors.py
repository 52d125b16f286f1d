"""Error responses in the form of each protocol."""

from __future__ import annotations

import math
import re
from http import HTTPStatus
from typing import Final

from starlette.responses import Response

from llm_serving import errors
from llm_serving.server.parsing.offload import json_response
from llm_serving.server.protocols.openai.schemas import ErrorDetail, ErrorResponse

_CODES: tuple[tuple[type[errors.LLMServingError], str, str | None], ...] = (
    (errors.AuthenticationError, "authentication_error", "invalid_api_key"),
    (errors.PermissionDeniedError, "permission_error", None),
    (errors.ModelNotFoundError, "not_found_error", "model_not_found"),
    (errors.RequestNotFoundError, "not_found_error", "request_not_found"),
    (errors.IdempotencyError, "idempotency_error", "idempotency_key_reused"),
    (errors.GoneError, "gone_error", "gone"),
    (errors.RequestCancelledError, "request_cancelled_error", "cancelled"),
    (errors.TimedOutError, "timeout_error", "timeout"),
    (errors.ContextLengthError, "invalid_request_error", "context_length_exceeded"),
    (errors.RequestError, "invalid_request_error", None),
    (errors.RateLimitError, "rate_limit_error", "rate_limit_exceeded"),
    (errors.TooLateError, "rate_limit_error", "deadline"),
    (errors.StoreFullError, "rate_limit_error", "store_full"),
    (errors.CapacityError, "rate_limit_error", "queue_full"),
    (errors.UnavailableError, "service_unavailable_error", "unavailable"),
)
"""(exception class, type and code of OpenAI's error body). The first match is used."""

_TGI_KINDS: Final = (
    (errors.RequestError, "validation"),
    (errors.CapacityError | errors.UnavailableError, "overloaded"),
    (errors.RequestCancelledError | errors.TimedOutError, "incomplete_generation"),
)
FIELD: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.\[\]]{0,63}")
UNAVAILABLE_RETRY_AFTER_S = 5.0
RETRY_AFTER_MS_HEADER = "retry-after-ms"
"""`Retry-After` in milliseconds, which the client libraries of OpenAI and Anthropic read."""
PREDICTED_TTFT_HEADER = "x-predicted-ttft-ms"
"""Predicted TTFT in ms. In a refusal, the TTFT if the client sends the request again after `Retry-After`."""


def openai_error(error: errors.LLMServingError) -> ErrorResponse:
    kind, code = next(((kind, code) for cls, kind, code in _CODES if isinstance(error, cls)), ("server_error", None))
    return ErrorResponse(
        ErrorDetail(str(error), kind, error.field if isinstance(error, errors.RequestError) else None, code)
    )


def internal_error() -> errors.LLMServingError:
    """Return the error that a client gets for a defect of the server. The log has the details."""
    return errors.WorkerError("internal error")


def openai_error_response(error: errors.LLMServingError) -> Response:
    return json_response(openai_error(error), error.http_status, error_headers(error))


def tgi_error_content(error: errors.LLMServingError) -> dict[str, str]:
    kind = next((kind for classes, kind in _TGI_KINDS if isinstance(error, classes)), "generation")
    return {"error": str(error), "error_type": kind}


def tgi_error_response(error: errors.LLMServingError) -> Response:
    status = HTTPStatus.UNPROCESSABLE_ENTITY if error.http_status == HTTPStatus.BAD_REQUEST else error.http_status
    return json_response(tgi_error_content(error), status, error_headers(error))


def legacy_error_response(error: errors.LLMServingError) -> Response:
    """Return OpenAI's error response or, for an invalid request, status 422 and the body `{"detail": [...]}`."""
    if isinstance(error, errors.RequestError) and error.http_status == HTTPStatus.BAD_REQUEST:
        detail = [{"loc": ["body", *error.field.split(".")], "msg": str(error), "type": "value_error"}]
        return json_response({"detail": detail}, HTTPStatus.UNPROCESSABLE_ENTITY)
    return openai_error_response(error)


def kind_of(error: errors.LLMServingError) -> str:
    """Return an error's class and wrong field for logs. Omit a field whose name the client may have invented."""
    field = error.field if isinstance(error, errors.RequestError) else ""
    return f"{type(error).__name__} {field}" if FIELD.fullmatch(field) else type(error).__name__


def error_headers(error: errors.LLMServingError) -> dict[str, str]:
    """Return the headers of an error response, which close the connection if the body was not fully read."""
    headers = {}
    if isinstance(error, errors.CapacityError | errors.UnavailableError):
        seconds = getattr(error, "retry_after", None)
        seconds = max(1.0, UNAVAILABLE_RETRY_AFTER_S if seconds is None else seconds)
        headers["retry-after"], headers[RETRY_AFTER_MS_HEADER] = str(math.ceil(seconds)), str(math.ceil(1000 * seconds))
    if isinstance(error, errors.CapacityError) and error.queue_estimate_ms is not None:
        headers["x-queue-estimate-ms"] = str(math.ceil(error.queue_estimate_ms))
    if isinstance(error, errors.CapacityError) and error.predicted_s is not None:
        headers[PREDICTED_TTFT_HEADER] = str(math.ceil(1000 * error.predicted_s))
    if isinstance(error, errors.AuthenticationError):
        headers["www-authenticate"] = 'Bearer realm="llm-serving"'
    if error.http_status in (HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.REQUEST_TIMEOUT):
        headers["connection"] = "close"
    return headers
