"""What operators do to replicas: look at them, have one leave, have it join again."""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.middleware.authentication import check_operator
from llm_serving.server.parsing.offload import json_response


class ReplicaView(Struct):
    replica: int
    state: str
    """loading, serving, restarting, draining (it finishes what it has) or left."""
    num_unfinished: int
    """Requests that it has."""
    machine: str
    """Address of the one on which its WorkAgent runs, or ran; empty: the master's own."""


class ReplicasView(Struct):
    replicas: list[ReplicaView]


async def show_replicas(engine: AsyncEngine, http_request: Request) -> Response:
    """Every replica: what it does, and how many requests it has."""
    check_operator(http_request)
    return _view(engine)


async def drain_replica(engine: AsyncEngine, http_request: Request) -> Response:
    """The replica gets no further requests; when it has finished those it has, its WorkAgent ends."""
    check_operator(http_request)
    engine.control.drain(_replica(http_request))
    return _view(engine)


async def join_replica(engine: AsyncEngine, http_request: Request) -> Response:
    """A drained replica serves again; one that has left is loaded first."""
    check_operator(http_request)
    engine.control.join(_replica(http_request))
    return _view(engine)


def _view(engine: AsyncEngine) -> Response:
    return json_response(ReplicasView([ReplicaView(*row) for row in engine.control.replica_rows()]))


def _replica(http_request: Request) -> int:
    given = http_request.path_params["replica"]
    if not (given.isascii() and given.isdecimal() and len(given) < 10):
        raise RequestError("replica", "must be the number of a replica", given)
    return int(given)


ENDPOINTS: Final = (
    Endpoint("GET", "/v1/replicas", show_replicas, "Tell what each replica does", answer=ReplicasView),
    Endpoint("POST", "/v1/replicas/{replica}/drain", drain_replica, "Have a replica leave", answer=ReplicasView),
    Endpoint("POST", "/v1/replicas/{replica}/join", join_replica, "Have a replica join again", answer=ReplicasView),
)
