"""What operators and clients do to requests by their id, and GET /v1/scheduler, which tells who holds what."""

from __future__ import annotations

import asyncio
from typing import Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.server.authentication import tenant_seen
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.error_responses import json_response
from llm_serving.server.scheduler_view import SchedulerView, view_of


class Cancelled(Struct):
    request_id: str
    cancelled: list[str]
    """Those of the engine's requests that this ends: one a choice. Empty: all had ended before."""


async def cancel_request(engine: AsyncEngine, http_request: Request) -> Response:
    """Ends a request at the next step; its client gets what there is and the finish reason `abort`."""
    request_id = http_request.path_params["request_id"]
    return json_response(Cancelled(request_id, engine.cancel(request_id, tenant_seen(http_request))))


async def show_scheduler(engine: AsyncEngine, http_request: Request) -> Response:
    """Slots, queues, tenants and blocks of every replica; of other tenants only numbers."""
    states = await engine.scheduler_states()
    known = {index: state for index, state in states.items() if state is not None}
    silent, tenant = [index for index, state in states.items() if state is None], tenant_seen(http_request)

    def answer() -> Response:
        return json_response(view_of(known, silent, engine.config.scheduler.policy, tenant))

    return await asyncio.to_thread(answer)


ENDPOINTS: Final = (
    Endpoint("POST", "/v1/requests/{request_id}/cancel", cancel_request, "End a request", answer=Cancelled),
    Endpoint("DELETE", "/v1/requests/{request_id}", cancel_request, "End a request", answer=Cancelled),
    Endpoint("GET", "/v1/scheduler", show_scheduler, "Tell who holds slots and blocks", answer=SchedulerView),
)
