"""One route as one line of a table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from llm_serving.core.memory import shortage
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import LLMServingError, RequestError, UnavailableError
from llm_serving.log import get_logger
from llm_serving.server.generation.streaming import ClientGoneError, internal_error
from llm_serving.server.http.request import UNSENT_KEY
from llm_serving.server.middleware.rate_limits import quota_of
from llm_serving.server.parsing.errors import kind_of, openai_error_response
from llm_serving.server.parsing.headers import check_headers, check_no_body, check_query, ignored_headers
from llm_serving.server.parsing.identity import REQUEST_ID_HEADER, request_id_of
from llm_serving.server.parsing.parameters import IGNORED_HEADER, ignored_parameters
from llm_serving.server.request_context import request_context_of

logger = get_logger(__name__)

RETRY_AFTER_S: Final = 1.0
"""Where the machine had none of something."""

Handler = Callable[[AsyncEngine, Request], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """A method and path, who answers it, and what its OpenAPI entry says."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: type | None = None
    """Struct of the request body."""
    answer: type | None = None
    """Struct of the answer with status 200; None: not JSON, or of the protocol's own form."""
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Parameter of the query -> its JSON schema."""
    error_response: Callable[[LLMServingError], Response] = openai_error_response
    id_headers: tuple[str, ...] = (REQUEST_ID_HEADER,)
    """What the id of a request is called in its answer, and in an error."""
    takes_form: bool = False
    """The body is a form, which the handler reads."""
    is_probe: bool = False
    """Asked again and again by machines, which may put something into the URL so that nobody answers from a cache."""
    needs_key: bool = True
    """Whether it is closed to requests without an API key, once `api_keys` has any."""

    def route(self, engine: AsyncEngine) -> Route:
        return Route(self.path, _Application(self, engine), methods=[self.method])

    async def respond(self, engine: AsyncEngine, request: Request) -> Response:
        try:
            if (quota := quota_of(request)) is not None:
                quota.take_request()
            in_url = [] if self.is_probe else check_query(request, self.query)
            if not self.is_probe:
                check_headers(request)
            if self.method != "GET" and self.body is None and not self.takes_form:
                await check_no_body(request, engine.config.serving)
            response = await self.handler(engine, request)
            _check_size(response, request, engine.config.serving.max_buffered_bytes)
            if request_id := response.headers.get(REQUEST_ID_HEADER):
                self._tell_id(response, request_id)
            in_body = filter(None, [ignored_parameters(request)])
            if ignored := ", ".join([*in_body, *in_url, *ignored_headers(request)]):
                response.headers[IGNORED_HEADER] = ignored
            return response
        except LLMServingError as error:
            return self._refuse(request, error)
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=499)  # never read: the connection is gone
        except Exception as error:
            if (lack := shortage(error)) is not None:
                logger.warning("%s %s was refused: %s", self.method, self.path, lack)
                why = f"the machine has none of what this takes at the moment: {lack}"
                return self._refuse(request, UnavailableError(why, RETRY_AFTER_S))
            logger.exception("%s %s failed", self.method, self.path)
            return self.error_response(internal_error())

    def _refuse(self, request: Request, error: LLMServingError) -> Response:
        note = request_context_of(request)
        request_id = note.request_id if note is not None and note.request_id else request_id_of(request)
        if note is not None:
            note.error, note.request_id = kind_of(error), request_id
        response = self.error_response(error)
        self._tell_id(response, request_id)
        return response

    def _tell_id(self, response: Response, request_id: str) -> None:
        for name in self.id_headers:
            response.headers[name] = request_id


def _check_size(response: Response, request: Request, most: int) -> None:
    """Raises RequestError for an answer that would be cut off: more than all connections may hold waits to be taken."""
    size = len(getattr(response, "body", b""))
    if size > most and UNSENT_KEY in request.scope:
        rule = f"must ask for an answer of at most {most} bytes (serving_config.max_buffered_bytes), or for a stream"
        raise RequestError("body", rule, size)


class _Application:
    """An endpoint of one engine as an ASGI application."""

    def __init__(self, endpoint: Endpoint, engine: AsyncEngine) -> None:
        self._endpoint = endpoint
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        if (note := request_context_of(request)) is not None:
            note.route = self._endpoint.path
        response = await self._endpoint.respond(self._engine, request)
        if (quota := quota_of(request)) is not None:
            response.headers.update(quota.headers())
        await response(scope, receive, send)
