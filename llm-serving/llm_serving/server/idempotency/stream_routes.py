"""GET /v1/streams/{id}: the rest of a stream, after a lost connection or a restart of the server."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestNotFoundError
from llm_serving.server.endpoint import Endpoints
from llm_serving.server.idempotency.request import EVENT_HEADER, resumed_by
from llm_serving.server.parsing.body import decode_body
from llm_serving.server.parsing.headers import read_header
from llm_serving.server.parsing.offload import INLINE_BYTES, off_loop
from llm_serving.server.protocols.openai import chat, completions
from llm_serving.server.protocols.openai.schemas import ChatCompletionRequest, CompletionRequest

RESUME_FROM: Final = "resume_from"

ENDPOINTS: Final = Endpoints()


@ENDPOINTS.add("GET", "/v1/streams/{stream_id}", "Resume a stream", query={RESUME_FROM: {"type": "string"}})
async def resume_stream(engine: AsyncEngine, http_request: Request) -> Response:
    """Continue a stream after the event in `Last-Event-ID`, or else in the query `resume_from`. Without either, send it
    from its start. Raise RequestNotFoundError if resuming is disabled.
    """
    if not engine.config.serving.resume_streams:
        raise RequestNotFoundError("stream_id", "cannot be resumed: serving_config.resume_streams is False")
    event_id, field = read_header(http_request, EVENT_HEADER) or "", "Last-Event-ID"
    if not event_id:
        event_id, field = http_request.query_params.get(RESUME_FROM, ""), RESUME_FROM
    stream_id = http_request.path_params["stream_id"]
    resumed = resumed_by(http_request.app.accepted, http_request, field, event_id, stream_id)
    if resumed.position.is_end:
        return Response(status_code=HTTPStatus.NO_CONTENT)  # a browser does not reconnect after this status
    http_request.state.resumed = resumed
    body = resumed.record.request
    is_long = len(body) > INLINE_BYTES
    if resumed.record.route == completions.PATH:
        completion = await off_loop(is_long, lambda: decode_body(body, CompletionRequest))
        return await completions.respond_to_completion(engine, http_request, completion)
    conversation = await off_loop(is_long, lambda: decode_body(body, ChatCompletionRequest))
    return await chat.respond_to_conversation(engine, http_request, conversation)
