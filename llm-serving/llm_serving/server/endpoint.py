"""Declares one HTTP route, and turns errors of its handler into responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from llm_serving.core.process import shortage
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import LLMServingError, RequestError, UnavailableError
from llm_serving.log import get_logger
from llm_serving.server.generation.generation import ClientGoneError
from llm_serving.server.http.request import REQUEST_KEY
from llm_serving.server.parsing.body import IGNORED_HEADER, check_no_body
from llm_serving.server.parsing.errors import internal_error, kind_of, openai_error_response
from llm_serving.server.parsing.headers import (
    REQUEST_ID_HEADER,
    check_headers,
    check_query,
    ignored_headers,
    request_id_of,
)
from llm_serving.server.request_context import quota_of, request_context_of

logger = get_logger(__name__)

RETRY_AFTER_S: Final = 1.0
"""Seconds after which a client may retry if the machine had no memory, files or threads left."""

ID_HEADERS: Final = (REQUEST_ID_HEADER,)
Handler = Callable[[AsyncEngine, Request], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    method: str
    path: str
    handler: Handler
    summary: str
    body: type | None = None
    answer: type | None = None
    """Struct of the response with status 200. None if the response is not JSON, or if its JSON has no struct."""
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    error_response: Callable[[LLMServingError], Response] = openai_error_response
    id_headers: tuple[str, ...] = ID_HEADERS
    takes_form: bool = False
    is_probe: bool = False
    """Whether monitoring polls the route. A probe may have any query, because monitoring adds one to bypass caches."""
    needs_key: bool = True

    def route(self, engine: AsyncEngine) -> Route:
        return Route(self.path, _EndpointApplication(self, engine), methods=[self.method])

    async def respond(self, engine: AsyncEngine, request: Request) -> Response:
        serving = engine.config.serving
        try:
            ignored: list[str] = []
            headers: list[str] = []
            if (quota := quota_of(request)) is not None:
                quota.take_request()
            if not self.is_probe:
                if request.scope.get("query_string"):
                    ignored = check_query(request, self.query)
                headers = check_headers(request)
            if self.method != "GET" and self.body is None and not self.takes_form:
                await check_no_body(request, serving)
            response = await self.handler(engine, request)
            size, most = len(getattr(response, "body", b"")), serving.max_buffered_bytes
            if size > most and REQUEST_KEY in request.scope:  # the server would abort the connection
                rule = f"must ask for an answer of at most {most} bytes (serving_config.max_buffered_bytes)"
                raise RequestError("body", f"{rule}, or for a stream", size)
            if self.id_headers is not ID_HEADERS and (request_id := response.headers.get(REQUEST_ID_HEADER)):
                for name in self.id_headers:
                    response.headers[name] = request_id
            if headers:
                ignored += ignored_headers(request, headers)
            if (in_body := request_context_of(request).ignored_parameters) is not None:
                ignored.insert(0, in_body)
            if ignored:
                response.headers[IGNORED_HEADER] = ", ".join(ignored)
            return response
        except LLMServingError as error:
            return self.refuse(request, error)
        except (ClientGoneError, ClientDisconnect):
            return Response(status_code=499)  # the client never reads it: the connection is closed
        except Exception as error:
            if (lack := shortage(error)) is not None:
                logger.warning("%s %s was refused: %s", self.method, self.path, lack)
                why = f"the machine lacks a resource for this request at the moment: {lack}"
                return self.refuse(request, UnavailableError(why, RETRY_AFTER_S))
            logger.exception("%s %s failed", self.method, self.path)
            return self.error_response(internal_error())

    def refuse(self, request: Request, error: LLMServingError) -> Response:
        """Record the kind of an error for the access log. Return the error response of the route's protocol."""
        context = request_context_of(request)
        context.error, context.request_id = kind_of(error), context.request_id or request_id_of(request)
        response = self.error_response(error)
        for name in self.id_headers:
            response.headers[name] = context.request_id
        return response


class Endpoints(list[Endpoint]):
    """The endpoints of one module."""

    def add(self, method: str, paths: str | Sequence[str], summary: str, **fields: Any) -> Callable[[Handler], Handler]:
        """Return a decorator that makes a function the handler of these paths. `fields` are those of `Endpoint`."""

        def register(handler: Handler) -> Handler:
            for path in (paths,) if isinstance(paths, str) else paths:
                self.append(Endpoint(method, path, handler, summary, **fields))
            return handler

        return register


@dataclass(frozen=True)
class _EndpointApplication:
    endpoint: Endpoint
    engine: AsyncEngine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        request_context_of(request).route = self.endpoint.path
        response = await self.endpoint.respond(self.engine, request)
        if (quota := quota_of(request)) is not None:
            response.headers.update(quota.headers())
        try:
            await response(scope, receive, send)
        except LLMServingError as error:  # a resumed stream fails before its status is sent
            if (sent := scope.get(REQUEST_KEY)) is not None and sent.is_started:
                raise
            await self.endpoint.refuse(request, error)(scope, receive, send)
