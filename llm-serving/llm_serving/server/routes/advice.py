"""GET /v1/scheduler/advice: what another value of a key would have made of the last minutes."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.server.authentication import check_operator
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.error_responses import json_response
from llm_serving.server.streaming import run_until_client_leaves

MINUTES: Final = 5
MAX_MINUTES: Final = 60


class AdviceView(Struct):
    """As `llm_serving.whatif.advice.Advice`."""

    requests: int
    refused: int
    seconds: float
    step_error: float
    played: int
    not_played: int
    advised: list[dict[str, Any]]
    otherwise: list[dict[str, Any]]


async def show_advice(engine: AsyncEngine, http_request: Request) -> Response:
    """Plays the requests of the last minutes under neighbours of the configuration, until its client leaves."""
    check_operator(http_request)
    given = http_request.query_params.get("minutes", str(MINUTES))
    if not (given.isascii() and given.isdecimal() and len(given) < 4 and 1 <= int(given) <= MAX_MINUTES):
        raise RequestError("minutes", f"must be an integer from 1 to {MAX_MINUTES}", given)
    work = http_request.app.advisor.advise(int(given))
    return json_response(await run_until_client_leaves(http_request.receive, work))


ENDPOINTS: Final = (
    Endpoint(
        "GET",
        "/v1/scheduler/advice",
        show_advice,
        "Tell what would have been better",
        answer=AdviceView,
        query={"minutes": {"type": "integer", "minimum": 1, "maximum": MAX_MINUTES}},
    ),
)
