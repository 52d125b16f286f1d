"""POST /v1/requests/{id}/cancel and DELETE /v1/requests/{id}: ending what runs or waits."""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.server.authentication import tenant_seen
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.error_responses import json_response


class Cancelled(Struct):
    request_id: str
    cancelled: list[str]
    """Those of the engine's requests that this ends: one a choice. Empty: all had ended before."""


async def cancel_request(engine: AsyncEngine, http_request: Request) -> Response:
    """Ends a request at the next step; its client gets what there is and the finish reason `abort`."""
    request_id = http_request.path_params["request_id"]
    return json_response(Cancelled(request_id, engine.cancel(request_id, tenant_seen(http_request))))


ENDPOINTS: Final = (
    Endpoint("POST", "/v1/requests/{request_id}/cancel", cancel_request, "End a request", answer=Cancelled),
    Endpoint("DELETE", "/v1/requests/{request_id}", cancel_request, "End a request", answer=Cancelled),
)
