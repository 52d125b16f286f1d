"""GET /health and /ping."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.parsing.offload import json_response
from llm_serving.server.protocols.openai.schemas import HealthResponse


async def show_health(engine: AsyncEngine, http_request: Request) -> Response:
    """200 while at least one WorkAgent serves, 503 before and after; the body says why."""
    health = engine.health()
    status = HTTPStatus.OK if health.ready else HTTPStatus.SERVICE_UNAVAILABLE
    return json_response(
        HealthResponse("ready" if health.ready else "unavailable", health.detail, health.loading), status
    )


ENDPOINTS: Final = (
    Endpoint(
        "GET",
        "/health",
        show_health,
        "Whether requests are served",
        answer=HealthResponse,
        is_probe=True,
        needs_key=False,
    ),
    Endpoint(
        "GET",
        "/ping",
        show_health,
        "Whether requests are served",
        answer=HealthResponse,
        is_probe=True,
        needs_key=False,
    ),
)
