"""Routes for the state of the server: health, metrics and replicas; drain and rejoin replicas, reload the YAML."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.control import ReplicaView
from llm_serving.errors import RequestError
from llm_serving.observability.metrics import MergedMetrics
from llm_serving.server.endpoint import Endpoints
from llm_serving.server.middleware.authentication import check_operator
from llm_serving.server.parsing.offload import json_response
from llm_serving.server.protocols.openai.schemas import HealthResponse
from llm_serving.server.served_models import health_of_all, models_shown

ENDPOINTS: Final = Endpoints()


@ENDPOINTS.add(
    "GET",
    ("/health", "/ping"),
    "Check whether the server is ready",
    answer=HealthResponse,
    is_probe=True,
    needs_key=False,
)
async def show_health(engine: AsyncEngine, http_request: Request) -> Response:
    """Return 200 if a WorkAgent is ready, else 503. If the query selects a model, only its WorkAgents count."""
    models = models_shown(http_request)
    health = engine.health() if models is None else health_of_all(models)
    status = HTTPStatus.OK if health.ready else HTTPStatus.SERVICE_UNAVAILABLE
    return json_response(
        HealthResponse("ready" if health.ready else "unavailable", health.detail, health.loading), status
    )


@ENDPOINTS.add("GET", "/metrics", "Return metrics in Prometheus format", is_probe=True)
async def show_metrics(engine: AsyncEngine, http_request: Request) -> Response:
    models = models_shown(http_request)
    metrics = engine.metrics if models is None else MergedMetrics([model.engine.metrics for model in models])
    content, content_type = metrics.render()
    return Response(content, headers={"content-type": content_type})


class ReplicasView(Struct):
    replicas: list[ReplicaView]


@ENDPOINTS.add("GET", "/v1/replicas", "Show the state of each replica", answer=ReplicasView)
async def show_replicas(engine: AsyncEngine, http_request: Request) -> Response:
    check_operator(http_request)
    return _view(engine)


@ENDPOINTS.add("POST", "/v1/replicas/{replica}/drain", "Stop assigning requests to a replica", answer=ReplicasView)
async def drain_replica(engine: AsyncEngine, http_request: Request) -> Response:
    """Drain a replica: it gets no further requests, and its WorkAgent exits after its last request."""
    check_operator(http_request)
    engine.control.drain(_replica(http_request))
    return _view(engine)


@ENDPOINTS.add("POST", "/v1/replicas/{replica}/join", "Assign requests to a drained replica again", answer=ReplicasView)
async def join_replica(engine: AsyncEngine, http_request: Request) -> Response:
    """Send requests to a drained replica again. If its WorkAgent has exited, load the replica first."""
    check_operator(http_request)
    engine.control.join(_replica(http_request))
    return _view(engine)


class ReloadView(Struct):
    changed: list[str]
    """Changes as "section.key: before -> after", without hashes of API keys. If the server has several models, each
    change begins with the model's name.
    """
    late: list[int]
    """Replicas whose WorkAgent is restarting. They apply the changes after the restart."""


@ENDPOINTS.add("POST", "/v1/reload", "Reload the YAML", answer=ReloadView)
async def reload(engine: AsyncEngine, http_request: Request) -> Response:
    check_operator(http_request)
    models = models_shown(http_request)
    if models is None:
        done = await engine.reloading.reload()
        return json_response(ReloadView([str(each) for each in done.changes], done.late))
    changed, late = list[str](), list[int]()
    for model in models:
        done = await model.engine.reloading.reload()
        changed += [f"{model.name}: {each}" for each in done.changes]
        late += done.late
    return json_response(ReloadView(changed, late))


def _view(engine: AsyncEngine) -> Response:
    return json_response(ReplicasView(engine.control.replica_views()))


def _replica(http_request: Request) -> int:
    given = http_request.path_params["replica"]
    if not (given.isascii() and given.isdecimal() and len(given) < 10):
        raise RequestError("replica", "must be the number of a replica", given)
    return int(given)
