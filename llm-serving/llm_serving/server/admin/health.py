"""GET /health, GET /ping and GET /metrics."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.observability.metrics import MergedMetrics
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.parsing.offload import json_response
from llm_serving.server.protocols.openai.schemas import HealthResponse
from llm_serving.server.served_models import health_of_all, models_shown


async def show_health(engine: AsyncEngine, http_request: Request) -> Response:
    """Return 200 if at least one WorkAgent is ready, else 503. The body gives the reason.

    With several models, the WorkAgents of all models count, unless the query parameter `model` selects one model.
    """
    models = models_shown(http_request)
    health = engine.health() if models is None else health_of_all(models)
    status = HTTPStatus.OK if health.ready else HTTPStatus.SERVICE_UNAVAILABLE
    return json_response(
        HealthResponse("ready" if health.ready else "unavailable", health.detail, health.loading), status
    )


async def show_metrics(engine: AsyncEngine, http_request: Request) -> Response:
    models = models_shown(http_request)
    metrics = engine.metrics if models is None else MergedMetrics([model.engine.metrics for model in models])
    content, content_type = metrics.render()
    return Response(content, headers={"content-type": content_type})


SUMMARY: Final = "Check whether the server is ready"
ENDPOINTS: Final = (
    *(
        Endpoint("GET", path, show_health, SUMMARY, answer=HealthResponse, is_probe=True, needs_key=False)
        for path in ("/health", "/ping")
    ),
    Endpoint("GET", "/metrics", show_metrics, "Return metrics in Prometheus format", is_probe=True),
)
