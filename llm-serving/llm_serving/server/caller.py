"""Who asks and how urgently: what a request says of itself beside its text, within what its API key allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.requests import Request

from llm_serving.config.schema import ApiKey, ServingConfig
from llm_serving.core.exchange import Exchange
from llm_serving.core.request_class import RequestClass
from llm_serving.errors import PermissionDeniedError, RequestError
from llm_serving.server.authentication import api_key_of
from llm_serving.server.exchange import exchange_of
from llm_serving.server.schemas import CallerFields

MAX_NAME_CHARS: Final = 256


@dataclass(frozen=True)
class Caller:
    """What the engine is told of who asks."""

    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    exchange: Exchange | None = field(default=None, compare=False)
    """The HTTP request it came with."""


def caller_of(config: ServingConfig, http_request: Request, *bodies: CallerFields) -> Caller:
    """Reads the fields from wherever a protocol may have them.

    Args:
        config: Its classes and keys.
        http_request: It has passed authentication.
        bodies: The body, and parts of it that may hold the fields as well.

    Raises:
        RequestError: A field breaks its rule, or is given twice with two values.
        PermissionDeniedError: The request wants to go before what its API key allows.
    """
    key = api_key_of(http_request)
    user, cache_salt = _name("user", bodies), _name("cache_salt", bodies)
    priority = _priority(_given("priority", bodies), _given("priority_class", bodies), config.request_classes, key)
    return Caller(priority, user if key is None else key.name, cache_salt, exchange_of(http_request))


def _priority(priority: int | None, class_name: str | None, classes: Sequence[RequestClass], key: ApiKey | None) -> int:
    ranks = {each.name: each.rank for each in classes}
    highest_class = None if key is None else key.highest_class
    if class_name is not None and priority is not None:
        raise RequestError("priority_class", "must not be given together with `priority`")
    if class_name is not None and class_name not in ranks:
        raise RequestError("priority_class", f"must be one of {', '.join(ranks)}", class_name)
    wanted = priority if class_name is None else ranks[class_name]
    if key is None or highest_class is None:
        return wanted or 0
    ceiling = ranks[highest_class]
    if wanted is not None and wanted < ceiling:
        field, given = ("priority", priority) if class_name is None else ("priority_class", class_name)
        rule = f"must not go before class {highest_class}, rank {ceiling}, with the API key of {key.name}"
        raise PermissionDeniedError(field, rule, given)
    # A request that asks for nothing is not refused: it runs as high as it may.
    return max(0, ceiling) if wanted is None else wanted


def _name(field: str, bodies: Sequence[CallerFields]) -> str:
    value = _given(field, bodies) or ""
    if len(value) > MAX_NAME_CHARS:
        raise RequestError(field, f"must be text of at most {MAX_NAME_CHARS} characters", len(value))
    return str(value)


def _given(field: str, bodies: Sequence[CallerFields]) -> Any:
    values = {value for body in bodies if (value := getattr(body, field)) is not None}
    if len(values) > 1:
        raise RequestError(field, "must be given once, or with one value")
    return next(iter(values), None)
