"""Routes that cancel, reprioritise or explain one request, and GET /v1/timeline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, TypeVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.core.request_class import class_of
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError, RequestNotFoundError
from llm_serving.observability.latency_breakdown import Explanation
from llm_serving.server.endpoint import Endpoints
from llm_serving.server.generation.generation import run_until_client_leaves
from llm_serving.server.middleware.authentication import tenant_seen
from llm_serving.server.parsing.body import read_fields
from llm_serving.server.parsing.caller import ceiling_of, requested_priority
from llm_serving.server.parsing.headers import query_integer
from llm_serving.server.parsing.offload import FairThreads, Long, json_response, large_json_response
from llm_serving.server.protocols.openai.schemas import PriorityRequest
from llm_serving.server.request_context import api_key_of, source_of

T = TypeVar("T")

_LOOKUPS: Final = FairThreads(1, "lookup")
"""One thread for all lookups, because a long lookup holds the GIL for up to a second, which delays the engines."""

ENDPOINTS: Final = Endpoints()


class Cancelled(Struct):
    request_id: str
    cancelled: list[str]
    """Cancelled engine requests, one for each choice. Empty if all had ended before."""


@ENDPOINTS.add("DELETE", "/v1/requests/{request_id}", "Cancel a request", answer=Cancelled)
@ENDPOINTS.add("POST", "/v1/requests/{request_id}/cancel", "Cancel a request", answer=Cancelled)
async def cancel_request(engine: AsyncEngine, http_request: Request) -> Response:
    """Abort a request at the next step. Its client gets the tokens so far and the finish reason `abort`."""
    request_id = http_request.path_params["request_id"]
    return json_response(Cancelled(request_id, engine.control.cancel(request_id, tenant_seen(http_request))))


class Reprioritised(Struct):
    request_id: str
    priority: int
    priority_class: str
    changed: list[str]
    unchanged: list[str]
    """Engine requests that have ended, or whose change would exceed the bypass limit of their class."""


@ENDPOINTS.add(
    "POST",
    "/v1/requests/{request_id}/priority",
    "Change the priority of a request",
    body=PriorityRequest,
    answer=Reprioritised,
)
async def reprioritise_request(engine: AsyncEngine, http_request: Request) -> Response:
    request_id, config = http_request.path_params["request_id"], engine.config
    body = await read_fields(engine, http_request, PriorityRequest)
    ceiling = ceiling_of(config, api_key_of(http_request))
    priority = requested_priority(config, ceiling, body.priority, body.priority_class)
    if priority is None:
        raise RequestError("priority", "or `priority_class` must be given")
    done = await engine.control.set_priority(request_id, priority, tenant_seen(http_request))
    changed = [engine_id for engine_id, is_changed in done.items() if is_changed]
    unchanged = [engine_id for engine_id, is_changed in done.items() if not is_changed]
    name = class_of(priority, config.request_classes).name
    return json_response(Reprioritised(request_id, priority, name, changed, unchanged))


class Explanations(Long):
    """Explanations of all engine requests with one id."""

    request_id: str
    requests: list[Explanation]


class Trace(Long):
    """A timeline of steps and requests, as a JSON object in the Trace Event Format."""

    traceEvents: list[dict[str, Any]]  # noqa: N815  the format's name
    displayTimeUnit: str  # noqa: N815


@ENDPOINTS.add(
    "GET", "/v1/requests/{request_id}/explain", "Explain how long a request waited and why", answer=Explanations
)
async def explain_request(engine: AsyncEngine, http_request: Request) -> Response:
    request_id = http_request.path_params["request_id"]
    tenant = tenant_seen(http_request)
    found = await _looked_up(http_request, lambda: engine.lookup.explain(request_id, tenant))
    if not found:
        rule = (
            f"must be the id of an unfinished request or of one of the latest {engine.config.serving.explain_requests}"
        )
        raise RequestNotFoundError("request_id", f"{rule} finished ones (serving_config.explain_requests)", request_id)
    return await large_json_response(Explanations(request_id, found))


@ENDPOINTS.add(
    "GET",
    "/v1/timeline",
    "Return a trace of the latest steps and their requests",
    answer=Trace,
    query={"steps": {"type": "integer", "minimum": 1}},
)
async def show_timeline(engine: AsyncEngine, http_request: Request) -> Response:
    """Return the latest steps (`?steps=N`) and their requests in the Trace Event Format, which Perfetto displays."""
    most = engine.config.serving.timeline_steps
    num_steps = query_integer(http_request, "steps", most, most, "serving_config.timeline_steps")
    tenant = tenant_seen(http_request)
    trace = await _looked_up(http_request, lambda: engine.lookup.timeline(num_steps, tenant))
    return await large_json_response(Trace(**trace))


async def _looked_up(http_request: Request, look: Callable[[], T]) -> T:
    work = asyncio.wrap_future(_LOOKUPS.submit(source_of(http_request), look))
    return await run_until_client_leaves(http_request.receive, work)
