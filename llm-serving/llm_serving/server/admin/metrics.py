"""GET /metrics."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.server.endpoint import Endpoint


async def show_metrics(engine: AsyncEngine, http_request: Request) -> Response:
    """All metrics in the text form of Prometheus."""
    content, content_type = engine.metrics.render()
    return Response(content, headers={"content-type": content_type})


ENDPOINTS: Final = (Endpoint("GET", "/metrics", show_metrics, "Metrics for Prometheus", is_probe=True),)
