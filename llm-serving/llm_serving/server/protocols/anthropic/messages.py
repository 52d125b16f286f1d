"""Anthropic's POST /v1/messages and /v1/messages/count_tokens, translated to chat completions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from msgspec import DecodeError, Raw, json
from starlette.requests import Request
from starlette.responses import Response

from llm_serving import errors
from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.server.endpoint import Endpoints
from llm_serving.server.generation.conversation import ConversationRequest, encode_chat, flat_error
from llm_serving.server.generation.events import named_event
from llm_serving.server.generation.message import CALLED, BlockKind, MessageBlock, MessageParser
from llm_serving.server.generation.pipeline import start_generation
from llm_serving.server.generation.response import ResponseBuilder, respond
from llm_serving.server.generation.tools import offered_tools, reasoning_format
from llm_serving.server.parsing.body import read_fields
from llm_serving.server.parsing.errors import error_headers
from llm_serving.server.parsing.headers import REQUEST_ID_HEADER, ResponseIdentity
from llm_serving.server.parsing.offload import json_response
from llm_serving.server.protocols.anthropic import conversation, schemas
from llm_serving.server.protocols.openai.schemas import ChatCompletionRequest
from llm_serving.server.request_context import source_of

_ERROR_TYPES: Final[tuple[tuple[type[errors.LLMServingError], str], ...]] = (
    (errors.AuthenticationError, "authentication_error"),
    (errors.PermissionDeniedError, "permission_error"),
    (errors.ModelNotFoundError, "not_found_error"),
    (errors.RequestTooLargeError, "request_too_large"),
    (errors.RequestError, "invalid_request_error"),
    (errors.RateLimitError, "rate_limit_error"),
    (errors.CapacityError, "rate_limit_error"),
    (errors.UnavailableError, "overloaded_error"),
    (errors.TimedOutError, "timeout_error"),
)
_ID_HEADERS: Final = (REQUEST_ID_HEADER, "request-id")
"""Response headers with the request id. Clients of this protocol read the second one."""


def _error(error: errors.LLMServingError) -> dict[str, object]:
    kind = next((kind for cls, kind in _ERROR_TYPES if isinstance(error, cls)), "api_error")
    return {"error": {"type": kind, "message": str(error)}, "type": "error"}


def _error_response(error: errors.LLMServingError) -> Response:
    return json_response(_error(error), error.http_status, error_headers(error))


ENDPOINTS: Final = Endpoints()


@ENDPOINTS.add(
    "POST",
    "/v1/messages",
    "Answer a conversation (Anthropic)",
    body=schemas.MessagesRequest,
    answer=schemas.MessagesResponse,
    error_response=_error_response,
    id_headers=_ID_HEADERS,
)
async def create_message(engine: AsyncEngine, http_request: Request) -> Response:
    body = await read_fields(engine, http_request, schemas.MessagesRequest)
    chat = ChatCompletionRequest(
        messages=conversation.messages_of(body.system, body.messages),
        continue_final_message=_continues_last(body.messages),
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        stop=body.stop_sequences,
        seed=body.seed,
        response_format=conversation.response_format_of(body.output_config),
        thinking_token_budget=conversation.budget_of(body.thinking),
        reasoning_effort=_effort_of(engine, body),
        tools=conversation.tools_of(body.tools),
        tool_choice=conversation.choice_of(body.tool_choice),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
    )
    request = _MessagesRequest(engine, http_request, body, chat)
    started = await start_generation(request)
    [parser] = request.message_parsers(started)
    builder = MessagesBuilder(started.identity, parser)
    return await respond(http_request, started, builder, stream=bool(body.stream))


@ENDPOINTS.add(
    "POST",
    "/v1/messages/count_tokens",
    "Count the tokens of a conversation (Anthropic)",
    body=schemas.CountTokensRequest,
    answer=schemas.CountTokensResponse,
    error_response=_error_response,
    id_headers=_ID_HEADERS,
)
async def count_tokens(engine: AsyncEngine, http_request: Request) -> Response:
    body = await read_fields(engine, http_request, schemas.CountTokensRequest)
    conversation.budget_of(body.thinking)
    conversation.response_format_of(body.output_config)
    messages = conversation.messages_of(body.system, body.messages)
    tools, choice = conversation.tools_of(body.tools), conversation.choice_of(body.tool_choice)
    chat = ChatCompletionRequest(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        continue_final_message=_continues_last(body.messages),
        reasoning_effort=_effort_of(engine, body),
    )
    try:
        tokens = await encode_chat(engine, source_of(http_request), chat, offered_tools(engine, chat))
    except errors.RequestError as error:
        raise _translate_error(error) from None
    return json_response(schemas.CountTokensResponse(len(tokens)))


_FIELDS: Final = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "thinking.type",
}
_TOOL_SCHEMA: Final = re.compile(r"^(tools\[\d+\])\.parameters\b")


def _translate_error(error: errors.RequestError) -> errors.RequestError:
    if error.field in _FIELDS:
        return error.renamed(_FIELDS[error.field])
    if error.field == "tool_choice" and error.value == "required":
        return error.renamed("tool_choice.type", "any")
    if error.field == "continue_final_message":
        rule = error.rule.removeprefix("must be false, ")
        return errors.RequestError("messages", f"must not end with the assistant's: {rule}")
    flat = flat_error(error, "output_config.format")
    return flat.renamed(re.sub(_TOOL_SCHEMA, r"\1.input_schema", flat.field))


class _MessagesRequest(ConversationRequest):
    id_prefix = "msg"
    translate_error = staticmethod(_translate_error)


def _continues_last(turns: list[schemas.ConversationTurn]) -> bool:
    return bool(turns) and turns[-1].role == "assistant"


def _effort_of(engine: AsyncEngine, body: schemas.MessagesRequest | schemas.CountTokensRequest) -> str | None:
    """Return "none" if the request disables thinking and the answer could begin with reasoning, else None."""
    must_not_think = body.thinking is not None and body.thinking.type == "disabled"
    may_think = reasoning_format(engine) is not None and not _continues_last(body.messages)
    return "none" if must_not_think and may_think else None


class MessagesBuilder(ResponseBuilder):
    def __init__(self, identity: ResponseIdentity, parser: MessageParser) -> None:
        self._identity = identity
        self._parser = parser
        self._last: RequestOutput | None = None

    def encode_delta(self, index: int, output: RequestOutput) -> bytes:
        is_first, self._last = self._last is None, output
        chunk = _event("message_start", message=self._message(output, [])) if is_first else b""
        for block, is_new, text in self._parser.parse(output):
            if is_new:
                if block.index:
                    chunk += _event("content_block_stop", index=block.index - 1)
                chunk += _event("content_block_start", index=block.index, content_block=_OPENINGS[block.kind](block))
            kind, field = _DELTAS[block.kind]
            chunk += _event("content_block_delta", index=block.index, delta={"type": kind, field: text})
        return chunk

    async def finish(self) -> bytes:
        assert self._last is not None
        count = len(self._parser.blocks)
        chunk = _event("content_block_stop", index=count - 1) if count else b""
        reason, sequence = self._ending(self._last)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return chunk + _event("message_delta", delta=delta, usage=_usage(self._last)) + _event("message_stop")

    def error_chunk(self, error: errors.LLMServingError) -> bytes:
        return named_event("error", _error(error))

    def fold(self, index: int, output: RequestOutput) -> None:
        self._last = output
        self._parser.fold(output)

    async def response(self, headers: dict[str, str]) -> Response:
        assert self._last is not None
        message = self._message(self._last, [_content(each) for each in self._parser.blocks] or [schemas.TextBlock("")])
        message.stop_reason, message.stop_sequence = self._ending(self._last)
        return json_response(message, headers=headers)

    def _message(self, output: RequestOutput, content: list[schemas.ResponseBlock]) -> schemas.MessagesResponse:
        return schemas.MessagesResponse(
            id=self._identity.id, model=self._identity.model, content=content, usage=_usage(output)
        )

    def _ending(self, output: RequestOutput) -> tuple[str, str | None]:
        """Return the stop reason, and the stop sequence if that is the reason."""
        if output.finish_reason is not FinishReason.STOP:
            return "max_tokens", None
        if self._parser.finish_reason(output) == CALLED:
            return "tool_use", None
        if isinstance(output.stop_reason, str):
            return "stop_sequence", output.stop_reason
        return "end_turn", None


_OPENINGS: Final[dict[BlockKind, Callable[[MessageBlock], schemas.ResponseBlock]]] = {
    "text": lambda block: schemas.TextBlock(""),
    "reasoning": lambda block: schemas.ThinkingBlock(""),
    "call": lambda block: schemas.ToolUseBlock(block.id, block.name, Raw(b"{}")),
}
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""Kind of a block -> (type of its deltas, name of their field that holds the text)."""


def _content(block: MessageBlock) -> schemas.ResponseBlock:
    if block.kind == "text":
        return schemas.TextBlock(block.text)
    if block.kind == "reasoning":
        return schemas.ThinkingBlock(block.text)
    return schemas.ToolUseBlock(block.id, block.name, _object(block.text))


def _object(arguments: str) -> Raw:
    try:
        json.decode(arguments, type=dict)
    except (DecodeError, RecursionError):
        return Raw(json.encode({"INVALID_JSON": arguments}))
    return Raw(arguments.encode())


def _usage(output: RequestOutput) -> schemas.MessagesUsage:
    num_cached = output.num_cached_tokens
    return schemas.MessagesUsage(output.num_prompt_tokens - num_cached, output.num_output_tokens, num_cached)


def _event(kind: str, **fields: object) -> bytes:
    return named_event(kind, {"type": kind, **fields})
