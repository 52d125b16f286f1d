"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.core.request_output import PromptLogprobs, RequestOutput, TokenLogprobs
from llm_serving.core.sampling_params import MAX_LOGPROBS
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.server.answered_message import AnsweredMessage
from llm_serving.server.caller import caller_of
from llm_serving.server.choices import choices_of
from llm_serving.server.conversation import converse, plain_message
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.generation import (
    MIN_LOGPROB,
    Generation,
    raise_on_error,
)
from llm_serving.server.idempotency.lookup import arrival
from llm_serving.server.off_loop import INLINE_BYTES, INLINE_TOKENS, off_loop
from llm_serving.server.openai_requests import (
    Identity,
    StreamedUsage,
    UsageCounter,
    check_stream_options,
    last_events,
    read_request,
    respond,
    tells_much,
    token_as_id,
)
from llm_serving.server.parameters import note_ignored
from llm_serving.server.prompt_logprobs import prompt_answer
from llm_serving.server.receipts import ReceiptDraft, begin_receipt
from llm_serving.server.schemas import (
    ChatAnswer,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
    CompletionTokensDetails,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from llm_serving.server.streaming import event
from llm_serving.server.tools import answer_parser, offered_tools, thought_counter
from llm_serving.text.tokenizer.tokenizer import Tokenizer

PATH: Final = "/v1/chat/completions"


async def create_chat_completion(engine: AsyncEngine, http_request: Request) -> Response:
    """Answers a conversation, `n` times."""
    request = await read_request(engine, http_request, ChatCompletionRequest)
    if request.echo and not (request.messages and request.messages[-1].role == "assistant"):
        note_ignored(http_request, "echo")
    return await answer_conversation(engine, http_request, request)


async def answer_conversation(engine: AsyncEngine, http_request: Request, request: ChatCompletionRequest) -> Response:
    """Answers a request that has come, or that was accepted and comes again."""
    streamed_usage = check_stream_options(request)
    caller = caller_of(engine.config, http_request, request)
    choices = choices_of(request, 1)
    async with arrival(engine, http_request, request, caller, route=PATH, prefix="chatcmpl", num_streams=choices.n) as (
        identity,
        turn,
    ):
        logprobs = _num_logprobs(request)
        offered = offered_tools(engine, request)
        receipt = await begin_receipt(engine, http_request, request, identity.id, identity.created)
        prompt, generation = await converse(
            engine,
            request,
            caller=caller,
            identity=identity,
            choices=choices,
            logprobs=logprobs,
            offered=offered,
            turn=turn,
            receipt=receipt,
        )
        messages = [
            AnsweredMessage(
                answer_parser(engine, request, prompt, offered),
                offered,
                turn.chance(index),
                thought_counter(engine, request, prompt),
            )
            for index in range(choices.n)
        ]
        answer = _Answer(engine.tokenizer, request, identity, streamed_usage, prompt, messages, receipt)
        return await respond(http_request, request, generation, answer, identity, turn)


def _echo(request: ChatCompletionRequest) -> str:
    """The text that the answer shall begin with."""
    last = request.messages[-1]
    return plain_message(0, last)["content"] if request.echo and last.role == "assistant" else ""


def _num_logprobs(request: ChatCompletionRequest) -> int | None:
    top = request.top_logprobs
    if not request.logprobs:
        if top:
            raise RequestError("top_logprobs", "must be given with logprobs: true only", top)
        return None
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise RequestError("top_logprobs", f"must be an integer from 0 to {MAX_LOGPROBS}", top)
    return top or 0


class _Answer:
    """Puts the pieces of a generation into the form of the protocol."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: ChatCompletionRequest,
        identity: Identity,
        streamed_usage: StreamedUsage,
        prompt: list[int],
        messages: Sequence[AnsweredMessage],
        receipt: ReceiptDraft | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._identity = identity
        self._prompt = prompt
        self._messages = messages
        self._receipt = receipt
        self._echo = _echo(request)
        self._streamed_usage = streamed_usage
        self._silent_pieces = bool(request.logprobs or request.return_token_ids or streamed_usage.in_every_piece)
        """Whether pieces without a text tell something."""
        self._usage = UsageCounter(len(messages))
        self._started: set[int] = set()
        """Choices of which something has been sent."""

    async def whole(self, generation: Generation) -> ChatCompletion:
        request = self._request
        choices = [
            ChatChoice(
                index=index,
                message=ChatAnswer(content=""),
                logprobs=ChatLogprobs([]) if request.logprobs else None,
                token_ids=[] if request.return_token_ids else UNSET,
            )
            for index in range(len(self._messages))
        ]
        told: PromptLogprobs | None = None
        async for index, output in generation.outputs():
            raise_on_error(output)
            choice = choices[index]
            told = told or output.prompt_logprobs
            message = self._messages[index]
            await off_loop(len(output.text) > INLINE_BYTES, partial(message.add, output))
            if choice.token_ids is not UNSET:
                choice.token_ids.extend(output.token_ids)
            if choice.logprobs is not None:
                read = partial(self._logprobs, output.logprobs)
                choice.logprobs.content.extend(await off_loop(len(output.logprobs) > INLINE_TOKENS, read))
            if output.finished:
                choice.finish_reason, choice.stop_reason = message.finish_reason(output), output.stop_reason
            self._usage.add(index, output)
        for choice, message in zip(choices, self._messages, strict=True):
            choice.message = message.whole(self._echo)
        identity = self._identity
        return ChatCompletion(
            id=identity.id,
            created=identity.created,
            model=identity.model,
            choices=choices,
            usage=(usage := self._total_usage()),
            receipt=UNSET if self._receipt is None else await off_loop(tells_much(usage), self._receipt.sealed),
            prompt_token_ids=self._prompt if request.return_token_ids else UNSET,
            prompt_logprobs=UNSET
            if (count := request.prompt_logprobs) is None
            else await off_loop(len(self._prompt) > INLINE_TOKENS, lambda: prompt_answer(self._tokenizer, told, count)),
        )

    def piece(self, index: int, output: RequestOutput) -> bytes:
        raise_on_error(output)
        request = self._request
        self._usage.add(index, output)
        usage = self._streamed_usage.of_piece(output)
        opening = b""
        if index not in self._started:
            self._started.add(index)
            role = self._chunk([ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))], usage)
            if request.return_token_ids:
                role.prompt_token_ids = self._prompt
            opening = event(role)
            if self._echo:
                choice = ChatChunkChoice(index=index, delta=ChatDelta(content=self._echo))
                opening += event(self._chunk([choice], usage))
        message = self._messages[index]
        delta = message.add(output)
        if delta is None and not (self._silent_pieces or output.finished):
            return opening
        choice = ChatChunkChoice(
            index=index,
            delta=ChatDelta(content="") if delta is None else delta,
            finish_reason=message.finish_reason(output),
            stop_reason=output.stop_reason,
        )
        if request.logprobs:
            choice.logprobs = ChatLogprobs(self._logprobs(output.logprobs))
        if request.return_token_ids:
            choice.token_ids = list(output.token_ids)
        return opening + event(self._chunk([choice], usage))

    async def end(self) -> bytes:
        return await last_events(self._streamed_usage, self._total_usage(), self._receipt, partial(self._chunk, []))

    def _total_usage(self) -> Usage:
        usage = self._usage.total()
        thought = [each.num_thought_tokens for each in self._messages]
        if thought[0] is not None:
            usage.completion_tokens_details = CompletionTokensDetails(sum(filter(None, thought)))
        return usage

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None = UNSET) -> ChatCompletionChunk:
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
        tokenizer = self._tokenizer
        text = token_as_id if self._request.return_tokens_as_token_ids else tokenizer.token_text
        return text(token_id), max(logprob, MIN_LOGPROB), list(tokenizer.token_bytes(token_id))


ENDPOINTS: Final = (
    Endpoint(
        "POST",
        PATH,
        create_chat_completion,
        "Answer a conversation",
        body=ChatCompletionRequest,
        answer=ChatCompletion,
    ),
)
