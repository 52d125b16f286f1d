"""GET /health, GET /ping and GET /metrics."""

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
    """Return 200 if at least one WorkAgent is ready, else 503. The body gives the reason."""
    health = engine.health()
    status = HTTPStatus.OK if health.ready else HTTPStatus.SERVICE_UNAVAILABLE
    return json_response(
        HealthResponse("ready" if health.ready else "unavailable", health.detail, health.loading), status
    )


async def show_metrics(engine: AsyncEngine, http_request: Request) -> Response:
    content, content_type = engine.metrics.render()
    return Response(content, headers={"content-type": content_type})


SUMMARY: Final = "Check whether the server is ready"
ENDPOINTS: Final = (
    *(
        Endpoint("GET", path, show_health, SUMMARY, answer=HealthResponse, is_probe=True, needs_key=False)
        for path in ("/health", "/ping")
    ),
    Endpoint("GET", "/metrics", show_metrics, "Return metrics in Prometheus format", is_probe=True),
)
