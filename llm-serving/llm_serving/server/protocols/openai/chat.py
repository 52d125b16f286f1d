"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.core.request_output import PromptLogprobs, RequestOutput, TokenLogprobs
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.server.endpoint import Endpoints
from llm_serving.server.generation.conversation import ConversationRequest, template_message
from llm_serving.server.generation.events import TextEvents, event
from llm_serving.server.generation.logprobs import MIN_LOGPROB, prompt_token_logprobs
from llm_serving.server.generation.message import BlockDelta, MessageBlock, MessageParser
from llm_serving.server.generation.pipeline import StartedGeneration, start_generation
from llm_serving.server.generation.response import respond
from llm_serving.server.parsing.body import note_ignored, read_fields
from llm_serving.server.parsing.offload import INLINE_TOKENS, off_loop
from llm_serving.server.protocols.openai.requests import OpenAIResponseBuilder, check_stream_options
from llm_serving.server.protocols.openai.schemas import (
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
    ChatResponseMessage,
    CompletionTokensDetails,
    JsonObject,
    TokenLogprob,
    ToolCall,
    TopLogprob,
    Usage,
)

PATH: Final = "/v1/chat/completions"

ENDPOINTS: Final = Endpoints()


@ENDPOINTS.add("POST", PATH, "Answer a conversation", body=ChatCompletionRequest, answer=ChatCompletion)
async def create_chat_completion(engine: AsyncEngine, http_request: Request) -> Response:
    body = await read_fields(engine, http_request, ChatCompletionRequest)
    if body.echo and not (body.messages and body.messages[-1].role == "assistant"):
        note_ignored(http_request, "echo")
    return await respond_to_conversation(engine, http_request, body)


async def respond_to_conversation(engine: AsyncEngine, http_request: Request, body: ChatCompletionRequest) -> Response:
    """Respond to a new request, or continue the stream of an earlier request that the client resumes."""
    check_stream_options(body)
    request = _ChatRequest(engine, http_request, body, body)
    started = await start_generation(request)
    return await respond(http_request, started, ChatBuilder(request, started), stream=bool(body.stream))


class _ChatRequest(ConversationRequest):
    id_prefix = "chatcmpl"
    route = PATH


def _joined(deltas: Sequence[BlockDelta]) -> JsonObject:
    joined: JsonObject = {}
    for block, is_new, text in deltas:
        if block.kind == "call":
            joined.setdefault("tool_calls", []).append(_call_delta(block, is_new, text))
        else:
            name = "content" if block.kind == "text" else "reasoning_content"
            joined[name] = joined.get(name, "") + text
    return joined


def _call_delta(block: MessageBlock, is_new: bool, arguments: str) -> JsonObject:
    if not is_new:
        return {"index": block.index_in_kind, "function": {"arguments": arguments}}
    function = {"arguments": arguments, "name": block.name}
    return {"index": block.index_in_kind, "id": block.id, "type": "function", "function": function}


def _echo(body: ChatCompletionRequest) -> str:
    last = body.messages[-1]
    return template_message(0, last)["content"] if body.echo and last.role == "assistant" else ""


class ChatBuilder(OpenAIResponseBuilder):
    _body: ChatCompletionRequest

    def __init__(self, request: _ChatRequest, started: StartedGeneration) -> None:
        body = request.chat
        super().__init__(request, body, started)
        self._parsers = request.message_parsers(started)
        [self._prompt_ids] = started.prompts
        self._echo = _echo(body)
        self._choices = [
            ChatChoice(
                index=index,
                message=ChatResponseMessage(content=None),
                logprobs=ChatLogprobs([]) if body.logprobs else None,
                token_ids=[] if body.return_token_ids else UNSET,
            )
            for index in range(self._n)
        ]
        self._prompt_logprobs: PromptLogprobs | None = None

    def encode_delta(self, index: int, output: RequestOutput) -> bytes:
        self.record(index, output)
        usage, parser = self.usage_so_far(output), self._parsers[index]
        opening = b"" if index in self._started else self._opening(index, usage)
        deltas = parser.parse(output)
        if not (deltas or self._sends_empty_deltas or output.finished):
            return opening
        choice = ChatChunkChoice(
            index=index,
            delta=_joined(deltas) if deltas else {"content": ""},
            finish_reason=parser.finish_reason(output),
            stop_reason=output.stop_reason,
        )
        if self._body.logprobs:
            choice.logprobs = ChatLogprobs(self._logprobs(output.logprobs))
        if self._body.return_token_ids:
            choice.token_ids = list(output.token_ids)
        return opening + event(self._chunk([choice], usage))

    def _opening(self, index: int, usage: Usage | UnsetType | None) -> bytes:
        """Return the first events of a choice: its role and the text with which it begins."""

        def chunk(**delta: str) -> ChatCompletionChunk:
            return self._chunk([ChatChunkChoice(index=index, delta=delta)], usage)

        self._started.add(index)
        if self._parsers[index].is_plain and not self._sends_empty_deltas:
            self._text_events[index] = TextEvents(lambda text: chunk(content=text))
        role = chunk(role="assistant", content="")
        if self._body.return_token_ids:
            role.prompt_token_ids = self._prompt_ids
        return event(role) + (event(chunk(content=self._echo)) if self._echo else b"")

    def last_chunk(self, usage: Usage | UnsetType) -> ChatCompletionChunk:
        return self._chunk([], usage)

    def fold(self, index: int, output: RequestOutput) -> None:
        self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs
        self.record(index, output)
        choice, parser = self._choices[index], self._parsers[index]
        parser.fold(output)
        choice.finish_reason, choice.stop_reason = parser.finish_reason(output), output.stop_reason
        if choice.token_ids is not UNSET:
            choice.token_ids += output.token_ids
        if choice.logprobs is not None:
            choice.logprobs.content += self._logprobs(output.logprobs)

    async def build(self, usage: Usage) -> ChatCompletion:
        body, identity = self._body, self._identity
        for choice, parser in zip(self._choices, self._parsers, strict=True):
            choice.message = self._message(parser)
        whole = ChatCompletion(
            id=identity.id, created=identity.created, model=identity.model, choices=self._choices, usage=usage
        )
        if body.return_token_ids:
            whole.prompt_token_ids = self._prompt_ids
        if (count := body.prompt_logprobs) is not None:
            whole.prompt_logprobs = await off_loop(
                len(self._prompt_ids) > INLINE_TOKENS,
                lambda: prompt_token_logprobs(self._tokenizer, self._prompt_logprobs, count),
            )
        return whole

    def total_usage(self) -> Usage:
        usage = super().total_usage()
        counts = [parser.num_reasoning_tokens for parser in self._parsers]
        if counts[0] is not None:
            usage.completion_tokens_details = CompletionTokensDetails(sum(filter(None, counts)))
        return usage

    def _message(self, parser: MessageParser) -> ChatResponseMessage:
        content = self._echo + parser.text("text")
        called = [
            ToolCall(id=each.id, function=CalledFunction(each.name, each.text)) for each in parser.of_kind("call")
        ]
        return ChatResponseMessage(
            content=None if called and not content else content,
            reasoning_content=parser.text("reasoning") or UNSET,
            tool_calls=called or UNSET,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatCompletionChunk:
        identity = self._identity
        return ChatCompletionChunk(
            id=identity.id, created=identity.created, model=identity.model, choices=choices, usage=usage
        )

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> list[TokenLogprob]:
        return [
            TokenLogprob(
                *self._token(token.token_id, token.logprob),
                top_logprobs=[
                    TopLogprob(*self._token(token_id, value))
                    for token_id, value in zip(token.top_token_ids, token.top_logprobs, strict=True)
                ],
            )
            for token in logprobs
        ]

    def _token(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        return self.token_name(token_id), max(logprob, MIN_LOGPROB), list(self._tokenizer.token_bytes(token_id))
