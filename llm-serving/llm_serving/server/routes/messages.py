"""Anthropic's messages: POST /v1/messages and /v1/messages/count_tokens.

A conversation as in `chat`, in the words of another protocol. The client's key arrives in `x-api-key`, as all routes
read it. Events of a stream are named.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Final

from msgspec import DecodeError, Raw, json
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import (
    AuthenticationError,
    CapacityError,
    LLMServingError,
    ModelNotFoundError,
    PermissionDeniedError,
    RateLimitError,
    RequestError,
    RequestTooLargeError,
    TimedOutError,
    UnavailableError,
)
from llm_serving.server.answer_blocks import AnswerBlocks, Block, BlockKind
from llm_serving.server.answered_message import CALLED
from llm_serving.server.anthropic_conversation import budget_of, choice_of, effort_of, form_of, messages_of, tools_of
from llm_serving.server.anthropic_schemas import (
    AnsweredBlock,
    ConversationTurn,
    CountTokensRequest,
    CountTokensResponse,
    ErrorBody,
    InputDelta,
    MessageAnswer,
    MessageDelta,
    MessagesError,
    MessagesRequest,
    MessagesUsage,
    StreamEvent,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from llm_serving.server.caller import caller_of, source_of
from llm_serving.server.conversation import converse_once, render_chat
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.error_responses import error_headers, json_response
from llm_serving.server.flat_fields import flat_error
from llm_serving.server.generation import Generation, encode_text, raise_unless_whole
from llm_serving.server.off_loop import INLINE_BYTES, off_loop
from llm_serving.server.openai_requests import REQUEST_ID_HEADER, Identity, check_model
from llm_serving.server.parameters import read_fields
from llm_serving.server.schemas import ChatCompletionRequest
from llm_serving.server.streaming import StreamResponse, named_event
from llm_serving.server.tools import offered_tools, tells_thoughts
from llm_serving.server.whole_answers import complete_whole

_ERROR_TYPES: Final[tuple[tuple[type[LLMServingError], str], ...]] = (
    (AuthenticationError, "authentication_error"),
    (PermissionDeniedError, "permission_error"),
    (ModelNotFoundError, "not_found_error"),
    (RequestTooLargeError, "request_too_large"),
    (RequestError, "invalid_request_error"),
    (RateLimitError, "rate_limit_error"),
    (CapacityError, "rate_limit_error"),
    (UnavailableError, "overloaded_error"),
    (TimedOutError, "timeout_error"),
)
"""The first that fits names the error to the client."""
_ID_HEADERS: Final = (REQUEST_ID_HEADER, "request-id")
"""The second is the one that clients of this protocol read."""


async def create_message(engine: AsyncEngine, http_request: Request) -> Response:
    """Answers a conversation."""
    request = await read_fields(engine, http_request, MessagesRequest)
    check_model(engine, request.model)
    caller = caller_of(engine.config, http_request, request)
    goes_on = _goes_on(request.messages)
    chat = ChatCompletionRequest(
        messages=messages_of(request.system, request.messages),
        continue_final_message=goes_on,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        stop=request.stop_sequences,
        seed=request.seed,
        response_format=form_of(request.output_config),
        thinking_token_budget=budget_of(request.thinking),
        reasoning_effort=effort_of(request.thinking) if tells_thoughts(engine) and not goes_on else None,
        tools=tools_of(request.tools),
        tool_choice=choice_of(request.tool_choice),
        parallel_tool_calls=not (request.tool_choice and request.tool_choice.disable_parallel_tool_use),
    )
    identity, generation, blocks = await converse_once(
        engine, http_request, chat, caller=caller, prefix="msg", reworded=_in_our_words
    )
    answer = _Answer(identity, blocks)
    if request.stream:
        return StreamResponse(generation, answer, _error_event, headers=identity.headers)
    message = await complete_whole(http_request, generation, answer.whole(generation))
    return json_response(message, headers=identity.headers | generation.headers)


async def count_tokens(engine: AsyncEngine, http_request: Request) -> Response:
    """How many tokens the prompt of a conversation has."""
    request = await read_fields(engine, http_request, CountTokensRequest)
    check_model(engine, request.model)
    budget_of(request.thinking)
    form_of(request.output_config)
    messages = messages_of(request.system, request.messages)
    tools, choice = tools_of(request.tools), choice_of(request.tool_choice)
    chat = ChatCompletionRequest(
        messages=messages, tools=tools, tool_choice=choice, continue_final_message=_goes_on(request.messages)
    )
    try:
        text = await render_chat(engine, source_of(http_request), chat, offered_tools(engine, chat))
    except RequestError as error:
        raise _in_our_words(error) from None
    tokens = await encode_text(engine, text, "messages", add_special_tokens=False)
    return json_response(CountTokensResponse(len(tokens)))


_FIELDS: Final = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "thinking.type",
}
_SCHEMA_OF_TOOL: Final = re.compile(r"^(tools\[\d+\])\.parameters\b")


def _in_our_words(error: RequestError) -> RequestError:
    """An error of chat, whose fields have other names here."""
    if error.field in _FIELDS:
        return error.renamed(_FIELDS[error.field])
    if error.field == "continue_final_message":
        return RequestError(
            "messages", f"must not end with the assistant's: {error.rule.removeprefix('must be false, ')}"
        )
    ours = flat_error(error, "output_config.format")
    return ours.renamed(re.sub(_SCHEMA_OF_TOOL, r"\1.input_schema", ours.field))


def _goes_on(turns: list[ConversationTurn]) -> bool:
    """Whether the answer goes on with what the assistant has said."""
    return bool(turns) and turns[-1].role == "assistant"


class _Answer:
    """Puts the pieces of a generation into the form of the protocol."""

    def __init__(self, identity: Identity, blocks: AnswerBlocks) -> None:
        self._identity = identity
        self._blocks = blocks
        self._last: RequestOutput | None = None

    async def whole(self, generation: Generation) -> MessageAnswer:
        output = None
        async for _, output in generation.outputs():
            raise_unless_whole(output)
            await off_loop(len(output.text) > INLINE_BYTES, partial(self._blocks.add, output))
        assert output is not None
        content = [_written(block) for block in self._blocks.blocks] or [TextBlock("")]
        return self._message(output, content, self._ending(output))

    def piece(self, index: int, output: RequestOutput) -> bytes:
        del index
        raise_unless_whole(output)
        begun, self._last = self._last is not None, output
        told = b"" if begun else _event(StreamEvent(type="message_start", message=self._message(output, [])))
        for block, begins, text in self._blocks.add(output):
            if begins:
                if block.index:
                    told += _stopped(block.index - 1)
                opening = _OPENINGS[block.kind](block)
                told += _event(StreamEvent(type="content_block_start", index=block.index, content_block=opening))
            delta = _DELTAS[block.kind](text)
            told += _event(StreamEvent(type="content_block_delta", index=block.index, delta=delta))
        return told

    async def end(self) -> bytes:
        assert self._last is not None
        count = len(self._blocks.blocks)
        return (
            (_stopped(count - 1) if count else b"")
            + _event(StreamEvent(type="message_delta", delta=self._ending(self._last), usage=_usage(self._last)))
            + _event(StreamEvent(type="message_stop"))
        )

    def _message(
        self, output: RequestOutput, content: list[AnsweredBlock], ending: MessageDelta | None = None
    ) -> MessageAnswer:
        message = MessageAnswer(id=self._identity.id, model=self._identity.model, content=content, usage=_usage(output))
        if ending is not None:
            message.stop_reason, message.stop_sequence = ending.stop_reason, ending.stop_sequence
        return message

    def _ending(self, output: RequestOutput) -> MessageDelta:
        if output.finish_reason is not FinishReason.STOP:
            return MessageDelta("max_tokens", None)
        if self._blocks.finish_reason(output) == CALLED:
            return MessageDelta("tool_use", None)
        if isinstance(output.stop_reason, str):
            return MessageDelta("stop_sequence", output.stop_reason)
        return MessageDelta("end_turn", None)


_OPENINGS: Final[dict[BlockKind, Callable[[Block], AnsweredBlock]]] = {
    BlockKind.TEXT: lambda block: TextBlock(""),
    BlockKind.REASONING: lambda block: ThinkingBlock(""),
    BlockKind.CALL: lambda block: ToolUseBlock(block.id, block.name, Raw(b"{}")),
}
_DELTAS: Final[dict[BlockKind, Callable[[str], TextDelta | ThinkingDelta | InputDelta]]] = {
    BlockKind.TEXT: TextDelta,
    BlockKind.REASONING: ThinkingDelta,
    BlockKind.CALL: InputDelta,
}


def _written(block: Block) -> AnsweredBlock:
    if block.kind is BlockKind.TEXT:
        return TextBlock(block.text)
    if block.kind is BlockKind.REASONING:
        return ThinkingBlock(block.text)
    return ToolUseBlock(block.id, block.name, _object(block.text))


def _object(arguments: str) -> Raw:
    try:
        json.decode(arguments, type=dict)
    except (DecodeError, RecursionError):
        return Raw(json.encode({"INVALID_JSON": arguments}))
    return Raw(arguments.encode())


def _stopped(index: int) -> bytes:
    return _event(StreamEvent(type="content_block_stop", index=index))


def _usage(output: RequestOutput) -> MessagesUsage:
    num_cached = output.num_cached_tokens
    return MessagesUsage(output.num_prompt_tokens - num_cached, output.num_output_tokens, num_cached)


def _event(content: StreamEvent | MessagesError) -> bytes:
    return named_event(content.type, content)


def _error(error: LLMServingError) -> MessagesError:
    kind = next((kind for cls, kind in _ERROR_TYPES if isinstance(error, cls)), "api_error")
    return MessagesError(ErrorBody(kind, str(error)))


def _error_event(error: LLMServingError) -> bytes:
    return _event(_error(error))


def _error_response(error: LLMServingError) -> Response:
    return json_response(_error(error), error.http_status, error_headers(error))


ENDPOINTS: Final = (
    Endpoint(
        "POST",
        "/v1/messages",
        create_message,
        "Answer a conversation (Anthropic)",
        body=MessagesRequest,
        answer=MessageAnswer,
        error_response=_error_response,
        id_headers=_ID_HEADERS,
    ),
    Endpoint(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        "Count the tokens of a conversation (Anthropic)",
        body=CountTokensRequest,
        answer=CountTokensResponse,
        error_response=_error_response,
        id_headers=_ID_HEADERS,
    ),
)
