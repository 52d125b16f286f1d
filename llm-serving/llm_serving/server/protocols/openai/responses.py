"""OpenAI's responses, translated to chat completions: POST /v1/responses, and the routes of stored responses."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import LLMServingError, RequestError
from llm_serving.log import get_logger
from llm_serving.server.endpoint import Endpoints
from llm_serving.server.generation.conversation import ConversationRequest, flat_error
from llm_serving.server.generation.events import named_event
from llm_serving.server.generation.generation import Generation
from llm_serving.server.generation.message import BlockDelta, MessageBlock, MessageParser
from llm_serving.server.generation.pipeline import start_generation
from llm_serving.server.generation.response import ResponseBuilder, buffered, respond
from llm_serving.server.generation.tools import arguments_of
from llm_serving.server.middleware.authentication import tenant_seen
from llm_serving.server.parsing.body import read_fields
from llm_serving.server.parsing.errors import internal_error, openai_error
from llm_serving.server.parsing.offload import json_response
from llm_serving.server.protocols.openai import responses_conversation as conversation
from llm_serving.server.protocols.openai import responses_schemas as schemas
from llm_serving.server.protocols.openai.requests import PAGE, check_metadata, page_of, page_response
from llm_serving.server.protocols.openai.response_store import ResponseStore, StoredResponse
from llm_serving.server.protocols.openai.schemas import (
    ChatCompletionRequest,
    ChatMessage,
    FunctionOfMessage,
    ToolCallOfMessage,
)

logger = get_logger(__name__)

ORDERS: Final = ("desc", "asc")
"""The first is the default."""
_FIELDS: Final = {"max_tokens": "max_output_tokens", "messages": "input", "reasoning_effort": "reasoning.effort"}

_PATH: Final = "/v1/responses/{response_id}"
ENDPOINTS: Final = Endpoints()


@ENDPOINTS.add(
    "POST",
    "/v1/responses",
    "Answer a conversation (OpenAI's responses)",
    body=schemas.ResponsesRequest,
    answer=schemas.ResponseObject,
)
async def create_response(engine: AsyncEngine, http_request: Request) -> Response:
    body = await read_fields(engine, http_request, schemas.ResponsesRequest)
    store = store_of(http_request)
    _check(body, store)
    messages = conversation.messages_of(body.input)
    if body.previous_response_id is not None:
        messages = [*_conversation(store, body.previous_response_id, tenant_seen(http_request)), *messages]
    instructions = [ChatMessage("system", body.instructions)] if body.instructions else []
    chat = ChatCompletionRequest(
        messages=[*instructions, *messages],
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        tools=conversation.tools_of(body.tools),
        tool_choice=conversation.choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=conversation.response_format_of(body.text),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )
    request = _ResponsesRequest(engine, http_request, body, chat)
    started = await start_generation(request)
    [parser] = request.message_parsers(started)
    response = schemas.ResponseObject(
        id=f"resp_{secrets.token_hex(24)}",  # not the request id: clients can choose that
        created_at=started.identity.created,
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=started.identity.model,
        previous_response_id=body.previous_response_id,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=body.reasoning or schemas.Reasoning(),
        store=body.store is not False and store.keeps,
        temperature=body.temperature,
        text={"format": {"type": "text"}} | (body.text or {}),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_p=body.top_p,
    )
    stored = StoredResponse(response, request.caller.tenant, messages)
    builder = ResponsesBuilder(stored, store, parser)
    if not body.background:
        return await respond(http_request, started, builder, stream=bool(body.stream))
    generation = started.generation
    try:
        store.add_running(stored)
    except LLMServingError:
        await generation.aclose()
        raise
    stored.task = asyncio.create_task(_run_in_background(http_request, generation, builder))
    return await builder.response(started.identity.headers | generation.headers)


@ENDPOINTS.add("GET", _PATH, "Show a stored response", answer=schemas.ResponseObject)
async def show_response(engine: AsyncEngine, http_request: Request) -> Response:
    return json_response(_find(http_request).response)


@ENDPOINTS.add(
    "GET",
    f"{_PATH}/input_items",
    "List the input items of a stored response",
    query={**PAGE, "order": {"type": "string", "enum": list(ORDERS)}},
    answer=schemas.InputItemList,
)
async def list_input_items(engine: AsyncEngine, http_request: Request) -> Response:
    stored, (limit, after) = _find(http_request), page_of(http_request)
    order = http_request.query_params.get("order", ORDERS[0])
    if order not in ORDERS:
        raise RequestError("order", f"must be one of {', '.join(ORDERS)}", order)
    items = conversation.items_of(stored.input, stored.response.id.removeprefix("resp_"))
    if order == ORDERS[0]:
        items.reverse()
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        raise RequestError("after", "must be the id of an input item of this response", after)
    first = 0 if after is None else ids.index(after) + 1
    return await page_response(schemas.InputItemList, items[first:], limit)


@ENDPOINTS.add("DELETE", _PATH, "Delete a stored response", answer=schemas.DeletedResponse)
async def delete_response(engine: AsyncEngine, http_request: Request) -> Response:
    stored = _find(http_request)
    await _cancel(stored)
    store_of(http_request).remove(stored.response.id)
    return json_response(schemas.DeletedResponse(stored.response.id))


@ENDPOINTS.add("POST", f"{_PATH}/cancel", "Cancel a background response", answer=schemas.ResponseObject)
async def cancel_response(engine: AsyncEngine, http_request: Request) -> Response:
    stored = _find(http_request)
    if not stored.response.background:
        raise RequestError("response_id", "must be the id of a response with background: true", stored.response.id)
    await _cancel(stored)
    return json_response(stored.response)


def _translate_error(error: RequestError) -> RequestError:
    name = error.field.partition("[")[0]
    return error.renamed(_FIELDS[name]) if name in _FIELDS else flat_error(error, "text.format")


class _ResponsesRequest(ConversationRequest):
    id_prefix = "resp"
    translate_error = staticmethod(_translate_error)


def store_of(http_request: Request) -> ResponseStore:
    store = http_request.app.responses
    assert isinstance(store, ResponseStore)
    return store


def _find(http_request: Request) -> StoredResponse:
    return store_of(http_request).find(http_request.path_params["response_id"], tenant_seen(http_request))


def _conversation(store: ResponseStore, response_id: str, tenant: str | None) -> list[ChatMessage]:
    try:
        stored = store.find(response_id, tenant)
    except RequestError as error:
        raise error.renamed("previous_response_id", response_id) from None
    if stored.in_progress:
        raise RequestError("previous_response_id", "must be the id of a response that has ended", response_id)
    calls = (call for message in stored.messages for call in message.tool_calls or ())
    try:
        for call in calls:
            arguments_of("previous_response_id", call.function.arguments)
    except RequestError:
        rule = "must be the id of a response whose tool calls have complete JSON arguments"
        raise RequestError("previous_response_id", rule, response_id) from None
    return stored.messages


def _check(request: schemas.ResponsesRequest, store: ResponseStore) -> None:
    if request.background and request.stream:
        raise RequestError("background", "must not be given together with stream: true")
    if request.background and request.store is False:
        raise RequestError("background", "must not be given together with store: false")
    if not store.keeps and (request.background or request.store):
        field = "background" if request.background else "store"
        raise RequestError(field, "must be false: serving_config.response_store_bytes is 0, so no response is stored")
    check_metadata(request.metadata)


async def _run_in_background(http_request: Request, generation: Generation, builder: ResponsesBuilder) -> None:
    try:
        await buffered(http_request, generation, builder.collect(generation))
    except LLMServingError as error:
        builder.fail(error)
    except asyncio.CancelledError:
        builder.cancel()
        raise
    except Exception:
        logger.exception("The background response failed. request_id=%s", generation.streams[0].request_id)
        builder.fail(internal_error())
    finally:
        await generation.aclose()


async def _cancel(stored: StoredResponse) -> None:
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.wait([stored.task])


class ResponsesBuilder(ResponseBuilder):
    def __init__(self, stored: StoredResponse, store: ResponseStore, parser: MessageParser) -> None:
        self._stored = stored
        self._store = store
        self._parser = parser
        self._response = stored.response
        self._num_events = 0
        self._last_item_status = "in_progress"

    def encode_delta(self, index: int, output: RequestOutput) -> bytes:
        chunk = self._opening()
        for block, is_new, text in self._add(output):
            if is_new:
                chunk += self._closed(self._parser.blocks[block.index - 1]) if block.index else b""
                chunk += self._opened(block)
            if text:
                chunk += self._of_block(_DELTAS[block.kind], block, delta=text, **_logprobs(block))
        return chunk

    async def finish(self) -> bytes:
        response = self._response
        return self._closed(self._parser.blocks[-1]) + self._event(f"response.{response.status}", response=response)

    def error_chunk(self, error: LLMServingError) -> bytes:
        chunk = self._opening()
        self.fail(error)
        return chunk + self._event("response.failed", response=self._response)

    def fold(self, index: int, output: RequestOutput) -> None:
        self._add(output)

    async def response(self, headers: dict[str, str]) -> Response:
        return json_response(self._response, headers=headers)

    def fail(self, error: LLMServingError) -> None:
        detail = openai_error(error).error
        self._set_failure(detail.code or detail.type, detail.message)
        self._keep()

    def cancel(self) -> None:
        self._close("cancelled", "incomplete")

    def _add(self, output: RequestOutput) -> list[BlockDelta]:
        deltas = self._parser.fold(output)
        if not output.finished:
            return deltas
        if not self._parser.blocks:
            deltas.append((self._parser.open("text"), True, ""))
        num_prompt, num_output = output.num_prompt_tokens, output.num_output_tokens
        self._response.usage = schemas.ResponseUsage(
            num_prompt,
            schemas.InputTokensDetails(output.num_cached_tokens),
            num_output,
            schemas.OutputTokensDetails(self._parser.num_reasoning_tokens or 0),
            num_prompt + num_output,
        )
        if output.finish_reason is FinishReason.LENGTH:
            self._response.incomplete_details = schemas.IncompleteDetails("max_output_tokens")
            self._close("incomplete", "incomplete")
        else:
            self._close("completed", "completed")
        return deltas

    def _close(self, status: str, item_status: str) -> None:
        self._last_item_status = item_status
        self._response.output, self._response.status = [self._item(block) for block in self._parser.blocks], status
        self._stored.output = _message(self._parser)
        self._keep()

    def _set_failure(self, code: str, message: str) -> None:
        self._response.status, self._response.error = "failed", schemas.ResponseFailure(code, message)

    def _keep(self) -> None:
        """Store the response. If it is too large and runs in the background, store it as failed, without its output. If
        it is too large otherwise, set its field `store` to false.
        """
        self._stored.task = None
        if not self._response.store or self._store.add(self._stored):
            return
        if not self._response.background:
            self._response.store = False
            return
        self._response.output, self._response.incomplete_details, self._stored.output = [], None, None
        self._set_failure("too_large", "the response takes more than serving_config.response_store_bytes")
        self._store.add(self._stored)

    def _opening(self) -> bytes:
        if self._num_events:
            return b""
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self._response) for kind in kinds)

    def _item(self, block: MessageBlock) -> schemas.OutputItem:
        is_last = block.index == len(self._parser.blocks) - 1
        status, item_id, text = self._last_item_status if is_last else "completed", self._item_id(block), block.text
        if block.kind == "call":
            return schemas.FunctionCallItem(
                id=item_id, call_id=block.id, name=block.name, arguments=text, status=status
            )
        if block.kind == "reasoning":
            return schemas.ReasoningItem(id=item_id, content=[schemas.ReasoningText(text)], status=status)
        return schemas.OutputMessage(id=item_id, status=status, content=[schemas.OutputText(text)])

    def _item_id(self, block: MessageBlock) -> str:
        return f"{self._response.id.replace('resp', _PREFIXES[block.kind], 1)}_{block.index}"

    def _opened(self, block: MessageBlock) -> bytes:
        item = self._item(replace(block, parts=[]))
        item.status = "in_progress"
        if isinstance(item, schemas.FunctionCallItem):
            return self._of_block("output_item.added", block, item=item)
        part, item.content = item.content[0], []
        return self._of_block("output_item.added", block, item=item) + self._of_block(
            "content_part.added", block, part=part
        )

    def _closed(self, block: MessageBlock) -> bytes:
        item = self._item(block)
        if isinstance(item, schemas.FunctionCallItem):
            kind = "function_call_arguments.done"
            done = self._of_block(kind, block, arguments=item.arguments, name=item.name)
        else:
            part, kind = item.content[0], _DELTAS[block.kind].replace("delta", "done")
            done = self._of_block(kind, block, text=part.text, **_logprobs(block))
            done += self._of_block("content_part.done", block, part=part)
        return done + self._of_block("output_item.done", block, item=item)

    def _of_block(self, kind: str, block: MessageBlock, **fields: object) -> bytes:
        position: dict[str, object] = {} if "item" in fields else {"item_id": self._item_id(block)}
        position["output_index"] = block.index
        if "item" not in fields and block.kind != "call":
            position["content_index"] = 0
        return self._event(f"response.{kind}", **position, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        content = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return named_event(kind, content)


_PREFIXES: Final = {"text": "msg", "call": "fc", "reasoning": "rs"}
_DELTAS: Final = {
    "text": "output_text.delta",
    "call": "function_call_arguments.delta",
    "reasoning": "reasoning_text.delta",
}


def _logprobs(block: MessageBlock) -> dict[str, object]:
    return {"logprobs": []} if block.kind == "text" else {}


def _message(parser: MessageParser) -> ChatMessage:
    called = parser.of_kind("call")
    return ChatMessage(
        "assistant",
        parser.text("text"),
        tool_calls=[ToolCallOfMessage(FunctionOfMessage(each.name, each.text), each.id) for each in called] or None,
        reasoning_content=parser.text("reasoning") or None,
    )
