"""The caller of a request: tenant, priority and deadline, within the limits of the API key."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

from starlette.requests import Request

from llm_serving.admission.validation import check_priority
from llm_serving.config.schema import ServingConfig
from llm_serving.config.tables import ApiKey
from llm_serving.core.request_class import Caller, class_of
from llm_serving.core.timings import Clock
from llm_serving.errors import PermissionDeniedError, RequestError, TimedOutError
from llm_serving.server.middleware.rate_limits import Quota
from llm_serving.server.parsing.body import note_ignored
from llm_serving.server.parsing.headers import read_header
from llm_serving.server.protocols.openai.schemas import CallerFields
from llm_serving.server.request_context import RequestContext, api_key_of, quota_of, request_context_of, source_of

MAX_NAME_CHARS: Final = 256
TIMEOUT_HEADER: Final = "x-request-timeout-s"
PRIORITY_HEADER: Final = "x-priority"
CLASS_HEADER: Final = "x-request-class"
_RAW_PRIORITY, _RAW_CLASS = PRIORITY_HEADER.encode(), CLASS_HEADER.encode()
TIERS_WITHOUT_CLASS: Final = ("auto", "default", "standard_only")
"""Values of the field `service_tier` that select no class, unless a class has this `service_tier`."""
FIELDS: Final = ("user", "cache_salt", "priority", "priority_class", "service_tier", "timeout_s")
_FIELDS: Final = attrgetter(*FIELDS)
NUMBER: Final = re.compile(r"-?[0-9]{1,7}")
SECONDS: Final = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")

T = TypeVar("T")


class HttpCaller(Caller, frozen=True, eq=False):
    context: RequestContext | None = None
    quota: Quota | None = None


def caller_of(config: ServingConfig, http_request: Request, *bodies: CallerFields) -> HttpCaller:
    """Return the caller of a request. `bodies`: the request body and nested objects that may have the same fields."""
    key, context = api_key_of(http_request), request_context_of(http_request)
    fields = _FIELDS(bodies[0]) if len(bodies) == 1 else [_given(name, bodies) for name in FIELDS]
    user, cache_salt, priority, class_name, tier, timeout_s = fields
    user, cache_salt = str(user or ""), str(cache_salt or "")
    if max(len(user), len(cache_salt)) > MAX_NAME_CHARS:
        name, value = ("user", user) if len(user) > MAX_NAME_CHARS else ("cache_salt", cache_salt)
        raise RequestError(name, f"must be text of at most {MAX_NAME_CHARS} characters", len(value))
    ceiling = ceiling_of(config, key)
    headers = context.headers
    renamed: dict[str, str] = {}
    if _RAW_PRIORITY in headers or _RAW_CLASS in headers:
        given = (("priority", priority, PRIORITY_HEADER), ("priority_class", class_name, CLASS_HEADER))
        renamed = {field: header for field, value, header in given if value is None}
        priority, class_name = _with_headers(http_request, priority, class_name)
    if tier is not None:
        if class_name is not None or priority is not None:
            note_ignored(http_request, "service_tier")
            tier = None
        else:
            class_name = _class_of_tier(config, http_request, tier)
    if priority is not None or class_name is not None:
        try:
            priority = requested_priority(config, ceiling, priority, class_name)
        except RequestError as error:
            raise (error.renamed_by(renamed) if tier is None else error.renamed("service_tier", tier)) from None
    else:  # priority 0, or the ceiling if its priority is lower
        priority = 0 if ceiling is None else max(0, ceiling.rank)
    timeout_s = _timeout(config, http_request, timeout_s)
    tenant = user if key is None else key.name
    if user not in ("", tenant):
        note_ignored(http_request, "user")
    context.tenant, context.request_class = tenant, class_of(priority, config.request_classes).name
    return HttpCaller(
        priority=priority,
        tenant=tenant,
        cache_salt=cache_salt,
        deadline=None if timeout_s is None else context.http_timings.received_time + timeout_s,
        http_timings=context.http_timings,
        context=context,
        source=source_of(http_request),
        quota=quota_of(http_request),
    )


async def within_deadline(deadline: float | None, clock: Clock, work: Awaitable[T]) -> T:
    """Return the result of `work`. At the deadline, if any, cancel it and raise TimedOutError."""
    if deadline is None:
        return await work
    try:
        async with asyncio.timeout(max(0.0, deadline - clock())) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimedOutError("the deadline of the request has passed") from None


class PriorityCeiling(NamedTuple):
    """The highest request class that an API key, or a request without a key, may use."""

    class_name: str
    rank: int
    condition: str
    """When the ceiling applies, as a part of an error text."""


def ceiling_of(config: ServingConfig, key: ApiKey | None) -> PriorityCeiling | None:
    """Return the highest request class for clients with this API key, or for clients without a key if `key` is None.
    Return None if the configuration allows these clients every class.
    """
    name = config.serving.anonymous_highest_class if key is None else key.highest_class
    if name is None:
        return None
    condition = "without an API key (serving_config.anonymous_highest_class)"
    rank = next(each.rank for each in config.request_classes if each.name == name)
    return PriorityCeiling(name, rank, condition if key is None else f"with the API key of {key.name}")


def requested_priority(
    config: ServingConfig, ceiling: PriorityCeiling | None, priority: int | None, class_name: str | None
) -> int | None:
    """Return the priority that a request asks for, by number or by class. Return None if it asks for none. Raise
    RequestError if it gives both, an unknown class or a number out of range, PermissionDeniedError if the priority is
    above the ceiling.
    """
    ranks = {each.name: each.rank for each in config.request_classes}
    if class_name is not None and priority is not None:
        raise RequestError("priority_class", "must not be given together with a priority")
    if class_name is not None and class_name not in ranks:
        raise RequestError("priority_class", f"must be one of {', '.join(ranks)}", class_name)
    requested = priority if class_name is None else ranks[class_name]
    if ceiling is not None and requested is not None and requested < ceiling.rank:
        field, given = ("priority", priority) if class_name is None else ("priority_class", class_name)
        rule = f"must not go before class {ceiling.class_name}, rank {ceiling.rank}, {ceiling.condition}"
        raise PermissionDeniedError(field, rule, given)
    if priority is not None:
        check_priority(priority)
    return requested


def _with_headers(http_request: Request, priority: int | None, class_name: str | None) -> tuple[int | None, str | None]:
    number, name = (read_header(http_request, header) for header in (PRIORITY_HEADER, CLASS_HEADER))
    if number is not None:
        if not NUMBER.fullmatch(number):
            raise RequestError(PRIORITY_HEADER, "must be an integer of at most 7 digits", number)
        if priority not in (None, int(number)):
            raise RequestError("priority", f"must equal the header {PRIORITY_HEADER} if both are given", priority)
        priority = int(number)
    if class_name is not None and name not in (None, class_name):
        raise RequestError("priority_class", f"must equal the header {CLASS_HEADER} if both are given", class_name)
    return priority, name if class_name is None else class_name


def _class_of_tier(config: ServingConfig, http_request: Request, tier: str) -> str | None:
    tiers = {each.service_tier: each.name for each in config.request_classes if each.service_tier is not None}
    if not tiers:
        note_ignored(http_request, "service_tier")
        return None
    if tier not in tiers and tier not in TIERS_WITHOUT_CLASS:
        raise RequestError(
            "service_tier", f"must be one of {', '.join(dict.fromkeys((*tiers, *TIERS_WITHOUT_CLASS)))}", tier
        )
    return tiers.get(tier)


def _timeout(config: ServingConfig, http_request: Request, value: float | None) -> float | None:
    header = read_header(http_request, TIMEOUT_HEADER)
    if value is None and header is None:
        return None
    most = config.serving.max_timeout_s
    rule = f"must be a number of seconds above 0 and at most {most:g} (serving_config.max_timeout_s)"
    if header is not None:
        if not SECONDS.fullmatch(header):
            raise RequestError(TIMEOUT_HEADER, rule, header)
        if value is not None and value != float(header):
            raise RequestError("timeout_s", f"must equal the header {TIMEOUT_HEADER} if both are given", value)
        value = float(header)
    if value is not None and not 0 < value <= most:
        raise RequestError("timeout_s" if header is None else TIMEOUT_HEADER, rule, value)
    return value


def _given(field: str, bodies: Sequence[CallerFields]) -> Any:
    found = None
    for body in bodies:
        value = getattr(body, field)
        if value is not None:
            if found is not None and value != found:
                raise RequestError(field, "must not be given twice with different values")
            found = value
    return found
