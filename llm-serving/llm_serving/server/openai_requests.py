"""What the two OpenAI generation routes share: reading a request, identity of an answer, usage, responding."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.core.request_output import RequestOutput
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import ModelNotFoundError, RequestError
from llm_serving.server.error_responses import json_response, openai_error
from llm_serving.server.generation import Generation
from llm_serving.server.idempotency.request import Turn
from llm_serving.server.idempotency.resumable_stream import NumberedPieces
from llm_serving.server.off_loop import large_json_response, off_loop
from llm_serving.server.parameters import read_fields
from llm_serving.server.receipts import ReceiptDraft
from llm_serving.server.request_context import note_of
from llm_serving.server.schemas import ChatCompletionChunk, Completion, GenerationRequest, PromptTokensDetails, Usage
from llm_serving.server.streaming import DONE, Pieces, StreamResponse, event
from llm_serving.server.whole_answers import complete_whole

ANY_MODEL: Final = "*"
"""The alias that stands for every name."""
MAX_INLINE_TOKENS: Final = 256
"""Longer answers that tell more of their tokens than the text are written beside the event loop."""
REQUEST_ID_HEADER: Final = "x-request-id"
REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:\-]{1,128}")

AnyRequest = TypeVar("AnyRequest", bound=GenerationRequest)


async def read_request(engine: AsyncEngine, http_request: Request, kind: type[AnyRequest]) -> AnyRequest:
    """A request for the served model that asks for nothing that is not served.

    Raises:
        RequestError: Names the field that is wrong.
    """
    request = await read_fields(engine, http_request, kind)
    check_model(engine, request.model)
    return request


class Identified(Protocol):
    """A body that may name its answer."""

    request_id: str | None


@dataclass(frozen=True)
class Identity:
    """What every piece of one answer repeats."""

    id: str
    request_id: str
    created: int
    model: str

    @property
    def headers(self) -> dict[str, str]:
        return {REQUEST_ID_HEADER: self.request_id}


def identify(engine: AsyncEngine, http_request: Request, request: Identified, prefix: str) -> Identity:
    """The answer's id: the client's (`request_id`, or the header `x-request-id` if it is one), otherwise a random one.

    Raises:
        RequestError: `request_id` is malformed.
    """
    request_id = request.request_id
    if request_id is not None and not REQUEST_ID.fullmatch(request_id):
        raise RequestError("request_id", "must be 1 to 128 letters, digits or any of . _ : -", request_id)
    if request_id is None:
        request_id = request_id_of(http_request)
    if (note := note_of(http_request)) is not None:
        note.request_id = request_id
    return Identity(f"{prefix}-{request_id}", request_id, int(time.time()), engine.config.model.model_name)


def request_id_of(http_request: Request) -> str:
    """The header `x-request-id` if it is an id, otherwise a random one."""
    header = http_request.headers.get(REQUEST_ID_HEADER, "")
    return header if REQUEST_ID.fullmatch(header) else secrets.token_hex(16)


def check_model(engine: AsyncEngine, name: str | None) -> None:
    """Raises ModelNotFoundError unless the name is absent or means the served model."""
    served, aliases = engine.config.model.model_name, engine.config.model.model_aliases
    if name and name != served and name not in aliases and ANY_MODEL not in aliases:
        raise ModelNotFoundError("model", f"must be {served}, the model that is served, or one of its aliases", name)


class StreamedUsage(NamedTuple):
    """Where a stream tells the usage."""

    at_end: bool = False
    in_every_piece: bool = False

    def of_piece(self, output: RequestOutput) -> Usage | UnsetType | None:
        """What a piece of a choice has: that of the choice so far, or null where the end of the stream has it."""
        if self.in_every_piece:
            return _usage(output.num_prompt_tokens, output.num_output_tokens, output.num_cached_tokens)
        return None if self.at_end else UNSET


def check_stream_options(request: GenerationRequest) -> StreamedUsage:
    """Raises RequestError where something other than a stream has `stream_options`."""
    options = request.stream_options
    if options is None:
        return StreamedUsage()
    if not request.stream:
        raise RequestError("stream_options", "must be given with stream: true only")
    return StreamedUsage(bool(options.include_usage), bool(options.continuous_usage_stats))


class Answer(Pieces, Protocol):
    """Puts the pieces of a generation into the form of a route."""

    async def whole(self, generation: Generation) -> Any: ...


async def respond(
    http_request: Request,
    request: GenerationRequest,
    generation: Generation,
    answer: Answer,
    identity: Identity,
    turn: Turn,
) -> Response:
    """The answer as a stream of events or as one piece of JSON, whichever the request asks for."""
    if request.stream:
        pieces: Pieces = answer
        if turn.stream_id:
            pieces = NumberedPieces(answer, turn.stream_id, generation.num_streams, turn.position)
        return StreamResponse(
            generation,
            pieces,
            lambda error: event(openai_error(error)) + DONE,
            headers=identity.headers | turn.headers,
        )
    result = await complete_whole(http_request, generation, answer.whole(generation))
    headers = identity.headers | generation.headers | turn.headers
    tells_tokens = (
        request.return_token_ids
        or request.prompt_logprobs is not None
        or getattr(request, "logprobs", None) not in (None, False)
    )
    if tells_much(result.usage) and tells_tokens:
        return await large_json_response(result, headers)
    return json_response(result, headers=headers)


async def last_events(
    streamed: StreamedUsage,
    usage: Usage,
    receipt: ReceiptDraft | None,
    piece: Callable[[Usage | UnsetType], Completion | ChatCompletionChunk],
) -> bytes:
    """What ends a stream: that it is done, and before it what is to be told of the whole answer.

    Args:
        streamed: Whether the usage is told.
        usage: Of the whole answer.
        receipt: Told too, if there is one.
        piece: Makes an event without choices.
    """
    if not streamed.at_end and receipt is None:
        return DONE
    last = piece(usage if streamed.at_end else UNSET)
    if receipt is not None:
        last.receipt = await off_loop(tells_much(usage), receipt.sealed)
    return event(last) + DONE


def tells_much(usage: Usage) -> bool:
    """Whether what is told of each of these tokens is much."""
    return usage.total_tokens > MAX_INLINE_TOKENS


def token_as_id(token_id: int) -> str:
    """How `return_tokens_as_token_ids` shows a token."""
    return f"token_id:{token_id}"


class UsageCounter:
    """Tokens of one answer; each prompt counts once, however many choices it has."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._prompts: dict[int, tuple[int, int]] = {}
        self._outputs: dict[int, int] = {}

    def add(self, index: int, output: RequestOutput) -> None:
        self._prompts[index // self._n] = (output.num_prompt_tokens, output.num_cached_tokens)
        self._outputs[index] = output.num_output_tokens

    def total(self) -> Usage:
        num_prompt = sum(count for count, _ in self._prompts.values())
        return _usage(num_prompt, sum(self._outputs.values()), sum(cached for _, cached in self._prompts.values()))


def _usage(num_prompt: int, num_output: int, num_cached: int) -> Usage:
    return Usage(num_prompt, num_output, num_prompt + num_output, PromptTokensDetails(num_cached))
