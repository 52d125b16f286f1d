"""OpenAI's responses: POST /v1/responses, and what there is of those that are stored: asking for them and for what they
were given, deleting and cancelling them.

A conversation as in `chat`, in the words of another protocol. A stored response can be gone on with by its id. Events
of a stream are named and numbered.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import LLMServingError, RequestError
from llm_serving.log import get_logger
from llm_serving.server.answer_blocks import AnswerBlocks, Block, BlockKind, Told
from llm_serving.server.caller import caller_of
from llm_serving.server.conversation import converse_once
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.error_responses import json_response, openai_error
from llm_serving.server.flat_fields import flat_error
from llm_serving.server.generation import Generation, raise_unless_whole
from llm_serving.server.metadata import check_metadata
from llm_serving.server.middleware.authentication import tenant_seen
from llm_serving.server.off_loop import large_json_response
from llm_serving.server.openai_requests import check_model
from llm_serving.server.paging import PAGE, asked_page
from llm_serving.server.parameters import read_fields
from llm_serving.server.response_store import ResponseStore, StoredResponse
from llm_serving.server.responses_conversation import choice_of, form_of, items_of, messages_of, tools_of
from llm_serving.server.responses_schemas import (
    DeletedResponse,
    Failure,
    FunctionCallItem,
    IncompleteDetails,
    InputItemList,
    InputTokensDetails,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    Reasoning,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from llm_serving.server.schemas import ChatCompletionRequest, ChatMessage, FunctionOfMessage, ToolCallOfMessage
from llm_serving.server.streaming import StreamResponse, internal_error, named_event
from llm_serving.server.tools import arguments_of
from llm_serving.server.whole_answers import complete_whole, held

logger = get_logger(__name__)

ORDERS: Final = ("desc", "asc")
"""Of input items; the first where nothing is said."""
_FIELDS: Final = {"max_tokens": "max_output_tokens", "messages": "input", "reasoning_effort": "reasoning.effort"}
"""What fields of chat are called here."""


async def create_response(engine: AsyncEngine, http_request: Request) -> Response:
    """Answers a conversation."""
    request = await read_fields(engine, http_request, ResponsesRequest)
    check_model(engine, request.model)
    store = store_of(http_request)
    _check(request, store)
    caller = caller_of(engine.config, http_request, request)
    said = messages_of(request.input)
    if request.previous_response_id is not None:
        said = [*_conversation(store, request.previous_response_id, tenant_seen(http_request)), *said]
    instructions = [ChatMessage("system", request.instructions)] if request.instructions else []
    chat = ChatCompletionRequest(
        messages=[*instructions, *said],
        max_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        tools=tools_of(request.tools),
        tool_choice=choice_of(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=form_of(request.text),
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
    )
    identity, generation, blocks = await converse_once(
        engine, http_request, chat, caller=caller, prefix="resp", reworded=_in_our_words
    )
    response = ResponseObject(
        id=f"resp_{secrets.token_hex(24)}",  # random: it cannot be predicted or forged
        created_at=identity.created,
        status="in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=identity.model,
        previous_response_id=request.previous_response_id,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning=request.reasoning or Reasoning(),
        store=request.store is not False and store.keeps,
        temperature=request.temperature,
        text={"format": {"type": "text"}} | (request.text or {}),
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_p=request.top_p,
    )
    stored = StoredResponse(response, caller.tenant, said)
    answer = _Answer(stored, store, blocks)
    if request.stream:
        return StreamResponse(generation, answer, answer.failed, headers=identity.headers)
    if request.background:
        try:
            store.begin(stored)
        except LLMServingError:
            await generation.aclose()
            raise
        stored.task = asyncio.create_task(_compute(http_request, generation, answer))
        return json_response(response, headers=identity.headers | generation.headers)
    await complete_whole(http_request, generation, answer.whole(generation))
    return json_response(response, headers=identity.headers | generation.headers)


async def show_response(engine: AsyncEngine, http_request: Request) -> Response:
    """A stored response as it is at this moment."""
    del engine
    return json_response(_find(http_request).response)


async def list_input_items(engine: AsyncEngine, http_request: Request) -> Response:
    """What a stored response was given, the conversation before it included: the newest first, or the oldest."""
    del engine
    stored, (limit, after) = _find(http_request), asked_page(http_request)
    order = http_request.query_params.get("order", ORDERS[0])
    if order not in ORDERS:
        raise RequestError("order", f"must be one of {', '.join(ORDERS)}", order)
    items = items_of(stored.said, stored.response.id.removeprefix("resp_"))
    if order == ORDERS[0]:
        items.reverse()
    ids = [item.id for item in items]
    if after is not None and after not in ids:
        raise RequestError("after", "must be the id of one of these items", after)
    first = 0 if after is None else ids.index(after) + 1
    shown = items[first : first + limit]
    told = InputItemList(
        data=shown,
        first_id=shown[0].id if shown else None,
        last_id=shown[-1].id if shown else None,
        has_more=first + limit < len(items),
    )
    return await large_json_response(told)


async def delete_response(engine: AsyncEngine, http_request: Request) -> Response:
    """Forgets a stored response; one in progress ends."""
    del engine
    stored = _find(http_request)
    await _end(stored)
    store_of(http_request).drop(stored.response.id)
    return json_response(DeletedResponse(stored.response.id))


async def cancel_response(engine: AsyncEngine, http_request: Request) -> Response:
    """Ends a response that is computed in the background; what there is of it stays."""
    del engine
    stored = _find(http_request)
    if not stored.response.background:
        raise RequestError("response_id", "must be that of a response with background: true", stored.response.id)
    await _end(stored)
    return json_response(stored.response)


def _in_our_words(error: RequestError) -> RequestError:
    name = error.field.partition("[")[0]
    return error.renamed(_FIELDS[name]) if name in _FIELDS else flat_error(error, "text.format")


def store_of(http_request: Request) -> ResponseStore:
    """What the application keeps."""
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
        raise RequestError("previous_response_id", "must be that of a response that has ended", response_id)
    calls = (call for message in stored.messages for call in message.tool_calls or ())
    try:
        for call in calls:
            arguments_of("previous_response_id", call.function.arguments)
    except RequestError:
        rule = "must be that of a response whose calls have whole arguments, JSON objects"
        raise RequestError("previous_response_id", rule, response_id) from None
    return stored.messages


def _check(request: ResponsesRequest, store: ResponseStore) -> None:
    if request.background and request.stream:
        raise RequestError("background", "must not be given together with stream: true")
    if request.background and request.store is False:
        raise RequestError("background", "must not be given together with store: false")
    if not store.keeps and (request.background or request.store):
        field = "background" if request.background else "store"
        raise RequestError(field, "must be false, as no response is kept (serving_config.response_store_bytes)")
    check_metadata(request.metadata)


async def _compute(http_request: Request, generation: Generation, answer: _Answer) -> None:
    """A response for which nobody waits on a connection."""
    try:
        await held(http_request, generation, answer.whole(generation))
    except LLMServingError as error:
        answer.failed(error)
    except asyncio.CancelledError:
        answer.cancelled()
        raise
    except Exception:
        logger.exception("a response in the background failed")
        answer.failed(internal_error())
    finally:
        await generation.aclose()


async def _end(stored: StoredResponse) -> None:
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.wait([stored.task])


class _Answer:
    """Puts the pieces of a generation into the form of the protocol, and the whole into the store."""

    def __init__(self, stored: StoredResponse, store: ResponseStore, blocks: AnswerBlocks) -> None:
        self._stored = stored
        self._store = store
        self._blocks = blocks
        self._response = stored.response
        self._num_events = 0
        self._ending = "in_progress"
        """What has become of the last item."""

    async def whole(self, generation: Generation) -> ResponseObject:
        async for _, output in generation.outputs():
            raise_unless_whole(output)
            self._take(output)
        return self._response

    def piece(self, index: int, output: RequestOutput) -> bytes:
        del index
        raise_unless_whole(output)
        told = self._beginning()
        for block, begins, text in self._take(output):
            if begins:
                told += self._closed(self._blocks.blocks[block.index - 1]) if block.index else b""
                told += self._opened(block)
            if text:
                told += self._of_block(_DELTAS[block.kind], block, delta=text, **_logprobs(block))
        return told

    async def end(self) -> bytes:
        response = self._response
        return self._closed(self._blocks.blocks[-1]) + self._event(f"response.{response.status}", response=response)

    def failed(self, error: LLMServingError) -> bytes:
        """Notes that there will be no answer; the last event of a stream, which begins like any other."""
        told, detail = self._beginning(), openai_error(error).error
        self._fail(detail.code or detail.type, detail.message)
        self._keep()
        return told + self._event("response.failed", response=self._response)

    def cancelled(self) -> None:
        """Notes what there is of an answer that somebody has ended."""
        self._close("cancelled", "incomplete")

    def _take(self, output: RequestOutput) -> list[Told]:
        told = self._blocks.add(output)
        if not output.finished:
            return told
        if not self._blocks.blocks:
            told.append(self._blocks.say_nothing())
        num_prompt, num_output = output.num_prompt_tokens, output.num_output_tokens
        self._response.usage = ResponseUsage(
            num_prompt,
            InputTokensDetails(output.num_cached_tokens),
            num_output,
            OutputTokensDetails(self._blocks.num_thought_tokens or 0),
            num_prompt + num_output,
        )
        if output.finish_reason is FinishReason.LENGTH:
            self._response.incomplete_details = IncompleteDetails("max_output_tokens")
            self._close("incomplete", "incomplete")
        else:
            self._close("completed", "completed")
        return told

    def _close(self, status: str, item_status: str) -> None:
        self._ending = item_status
        self._response.output, self._response.status = [self._item(block) for block in self._blocks.blocks], status
        self._stored.answer = _message(self._blocks.blocks)
        self._keep()

    def _fail(self, code: str, message: str) -> None:
        self._response.status, self._response.error = "failed", Failure(code, message)

    def _keep(self) -> None:
        """What is too large is not kept, and says so: of one in the background nothing but that is left."""
        self._stored.task = None
        if not self._response.store or self._store.keep(self._stored):
            return
        if not self._response.background:
            self._response.store = False
            return
        self._response.output, self._response.incomplete_details, self._stored.answer = [], None, None
        self._fail("too_large", "the response takes more than serving_config.response_store_bytes")
        self._store.keep(self._stored)

    def _beginning(self) -> bytes:
        """The events that every stream begins with, if it has not begun."""
        if self._num_events:
            return b""
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self._response) for kind in kinds)

    def _item(self, block: Block) -> OutputItem:
        """As it is at this moment; all but the last one are complete."""
        is_last = block.index == len(self._blocks.blocks) - 1
        status, item_id, text = self._ending if is_last else "completed", self._item_id(block), block.text
        if block.kind is BlockKind.CALL:
            return FunctionCallItem(id=item_id, call_id=block.id, name=block.name, arguments=text, status=status)
        if block.kind is BlockKind.REASONING:
            return ReasoningItem(id=item_id, content=[ReasoningText(text)], status=status)
        return OutputMessage(id=item_id, status=status, content=[OutputText(text)])

    def _item_id(self, block: Block) -> str:
        return f"{self._response.id.replace('resp', _PREFIXES[block.kind], 1)}_{block.index}"

    def _opened(self, block: Block) -> bytes:
        item = self._item(Block(block.kind, block.index, block.id, block.name))
        item.status = "in_progress"
        if isinstance(item, FunctionCallItem):
            return self._of_block("output_item.added", block, item=item)
        part, item.content = item.content[0], []
        return self._of_block("output_item.added", block, item=item) + self._of_block(
            "content_part.added", block, part=part
        )

    def _closed(self, block: Block) -> bytes:
        item = self._item(block)
        if isinstance(item, FunctionCallItem):
            kind = "function_call_arguments.done"
            done = self._of_block(kind, block, arguments=item.arguments, name=item.name)
        else:
            part, kind = item.content[0], _DELTAS[block.kind].replace("delta", "done")
            done = self._of_block(kind, block, text=part.text, **_logprobs(block))
            done += self._of_block("content_part.done", block, part=part)
        return done + self._of_block("output_item.done", block, item=item)

    def _of_block(self, kind: str, block: Block, **fields: object) -> bytes:
        """An event of an item, by its place and its id, and where it is of its text, by the place of that."""
        if "item" not in fields:
            fields["item_id"] = self._item_id(block)
            if block.kind is not BlockKind.CALL:
                fields["content_index"] = 0
        return self._event(f"response.{kind}", output_index=block.index, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        content = ResponseEvent(type=kind, sequence_number=self._num_events, **fields)  # type: ignore[arg-type]
        self._num_events += 1
        return named_event(kind, content)


_PREFIXES: Final = {BlockKind.TEXT: "msg", BlockKind.CALL: "fc", BlockKind.REASONING: "rs"}
_DELTAS: Final = {
    BlockKind.TEXT: "output_text.delta",
    BlockKind.CALL: "function_call_arguments.delta",
    BlockKind.REASONING: "reasoning_text.delta",
}


def _logprobs(block: Block) -> dict[str, object]:
    return {"logprobs": []} if block.kind is BlockKind.TEXT else {}


def _message(blocks: list[Block]) -> ChatMessage:
    """An answer as the conversation goes on with it."""
    texts = {kind: "".join(block.text for block in blocks if block.kind is kind) for kind in BlockKind}
    calls = [
        ToolCallOfMessage(FunctionOfMessage(block.name, block.text), block.id)
        for block in blocks
        if block.kind is BlockKind.CALL
    ]
    return ChatMessage(
        "assistant",
        texts[BlockKind.TEXT],
        tool_calls=calls or None,
        reasoning_content=texts[BlockKind.REASONING] or None,
    )


_PATH: Final = "/v1/responses/{response_id}"
ENDPOINTS: Final = (
    Endpoint(
        "POST",
        "/v1/responses",
        create_response,
        "Answer a conversation (OpenAI's responses)",
        body=ResponsesRequest,
        answer=ResponseObject,
    ),
    Endpoint("GET", _PATH, show_response, "Show a stored response", answer=ResponseObject),
    Endpoint(
        "GET",
        f"{_PATH}/input_items",
        list_input_items,
        "List what a stored response was given",
        query={**PAGE, "order": {"type": "string", "enum": list(ORDERS)}},
        answer=InputItemList,
    ),
    Endpoint("DELETE", _PATH, delete_response, "Forget a stored response", answer=DeletedResponse),
    Endpoint("POST", f"{_PATH}/cancel", cancel_response, "End a response in the background", answer=ResponseObject),
)
"""A response is in the memory of the process: it ends with it."""
