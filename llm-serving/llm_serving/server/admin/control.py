"""Routes that cancel or reprioritise requests, and GET /v1/scheduler, which shows slots, queues and blocks."""

from __future__ import annotations

import asyncio
from typing import Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.core.request_class import class_of
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.server.admin.scheduler_view import SchedulerView, view_of
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.middleware.authentication import tenant_seen
from llm_serving.server.parsing.body import read_fields
from llm_serving.server.parsing.caller import ceiling_of, requested_priority
from llm_serving.server.parsing.offload import json_response
from llm_serving.server.protocols.openai.schemas import PriorityRequest
from llm_serving.server.request_context import api_key_of


class Cancelled(Struct):
    request_id: str
    cancelled: list[str]
    """Ids of the cancelled engine requests, one for each choice; empty: all choices had ended before."""


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
    """Ids of the engine requests that have ended, or whose change would exceed the bypass limit of their class."""


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


async def show_scheduler(engine: AsyncEngine, http_request: Request) -> Response:
    """Show slots, queues, tenants and blocks of every replica. The caller sees only totals of other tenants."""
    states = await engine.lookup.scheduler_states()
    known = {index: state for index, state in states.items() if state is not None}
    silent, tenant = [index for index, state in states.items() if state is None], tenant_seen(http_request)

    def answer() -> Response:
        return json_response(view_of(known, silent, engine.config.scheduler.policy, tenant))

    return await asyncio.to_thread(answer)


ENDPOINTS: Final = (
    Endpoint("POST", "/v1/requests/{request_id}/cancel", cancel_request, "Cancel a request", answer=Cancelled),
    Endpoint("DELETE", "/v1/requests/{request_id}", cancel_request, "Cancel a request", answer=Cancelled),
    Endpoint(
        "POST",
        "/v1/requests/{request_id}/priority",
        reprioritise_request,
        "Change the priority of a request",
        body=PriorityRequest,
        answer=Reprioritised,
    ),
    Endpoint(
        "GET",
        "/v1/scheduler",
        show_scheduler,
        "Show the running and waiting requests, slots and KV blocks",
        answer=SchedulerView,
    ),
)
