"""POST /v1/reload: the server reads its YAML again."""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.middleware.authentication import check_operator
from llm_serving.server.parsing.offload import json_response


class ReloadView(Struct):
    changed: list[str]
    """"section.key: before -> after"; of an API key's hash the key alone."""
    late: list[int]
    """Replicas whose WorkAgent is started again; they follow then."""


async def reload(engine: AsyncEngine, http_request: Request) -> Response:
    """Takes over all that has changed in the YAML, or refuses it as a whole."""
    check_operator(http_request)
    done = await engine.reloading.reload()
    return json_response(ReloadView([str(each) for each in done.changes], done.late))


ENDPOINTS: Final = (Endpoint("POST", "/v1/reload", reload, "Read the YAML again", answer=ReloadView),)
