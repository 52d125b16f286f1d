"""Code that the OpenAI routes share: usage, end of stream, whole responses, paging and metadata."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.core.request_output import RequestOutput
from llm_serving.errors import LLMServingError, RequestError
from llm_serving.server.generation.events import DONE, TextEvents, event
from llm_serving.server.generation.generation import Generation, raise_on_failure
from llm_serving.server.generation.pipeline import ProtocolRequest, StartedGeneration
from llm_serving.server.generation.response import ResponseBuilder
from llm_serving.server.parsing.errors import openai_error
from llm_serving.server.parsing.headers import query_integer
from llm_serving.server.parsing.offload import json_response, large_json_response, off_loop
from llm_serving.server.protocols.openai.schemas import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    GenerationRequest,
    Page,
    PromptTokensDetails,
    StreamOptions,
    Usage,
)

MAX_INLINE_TOKENS: Final = 256
"""Responses with more tokens are encoded outside the event loop if they report more than text."""


def check_stream_options(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options", "requires stream: true")


class OpenAIResponseBuilder(ResponseBuilder):
    def __init__(self, request: ProtocolRequest, body: GenerationRequest, started: StartedGeneration) -> None:
        self._tokenizer, self._body, self._n = request.engine.tokenizer, body, request.choices.n
        options = body.stream_options or StreamOptions()
        self._usage_at_end = bool(options.include_usage)
        self._usage_in_every_chunk = bool(options.continuous_usage_stats)
        self._tokens_of_prompt: dict[int, tuple[int, int]] = {}
        """Index of a prompt -> (number of its tokens, how many of them were cached)."""
        self._tokens_of_choice: dict[int, int] = {}
        self._identity = started.identity
        self._receipt = started.receipt
        logprobs = getattr(body, "logprobs", None)
        reports_tokens = (logprobs is not None and logprobs is not False) or bool(body.return_token_ids)
        self._reports_tokens = reports_tokens or body.prompt_logprobs is not None
        self._sends_empty_deltas = reports_tokens or self._usage_in_every_chunk
        self._started: set[int] = set()
        self._text_events: dict[int, TextEvents] = {}
        self._whole: Completion | ChatCompletion | None = None

    check = staticmethod(raise_on_failure)

    def error_chunk(self, error: LLMServingError) -> bytes:
        return event(openai_error(error)) + DONE

    def chunk(self, index: int, output: RequestOutput) -> bytes:
        events = self._text_events.get(index)
        if events is None or output.finish_reason is not None or self._receipt is not None:
            return super().chunk(index, output)
        return events.event(output.text) if output.text else b""  # the last chunk counts the tokens

    def record(self, index: int, output: RequestOutput) -> None:
        """Count the tokens of an output for the usage, and add the output to the receipt."""
        self._tokens_of_prompt[index // self._n] = (output.num_prompt_tokens, output.num_cached_tokens)
        self._tokens_of_choice[index] = output.num_output_tokens
        if self._receipt is not None:
            self._receipt.add(index, output)

    def usage_so_far(self, output: RequestOutput) -> Usage | UnsetType | None:
        """Return the field `usage` of a chunk. It is the usage of the choice so far if every chunk reports usage, null
        if only the end of the stream does, and unset if the stream reports no usage.
        """
        if self._usage_in_every_chunk:
            return usage_of(output.num_prompt_tokens, output.num_output_tokens, output.num_cached_tokens)
        return None if self._usage_at_end else UNSET

    def total_usage(self) -> Usage:
        num_prompt = num_cached = 0
        for prompt_tokens, cached_tokens in self._tokens_of_prompt.values():
            num_prompt += prompt_tokens
            num_cached += cached_tokens
        return usage_of(num_prompt, sum(self._tokens_of_choice.values()), num_cached)

    def token_name(self, token_id: int) -> str:
        as_id = self._body.return_tokens_as_token_ids
        return f"token_id:{token_id}" if as_id else self._tokenizer.token_text(token_id)

    @abstractmethod
    def last_chunk(self, usage: Usage | UnsetType) -> Completion | ChatCompletionChunk: ...

    @abstractmethod
    async def build(self, usage: Usage) -> Completion | ChatCompletion:
        """Return the complete response from all outputs. The caller adds the receipt (a verifiable record of it)."""

    async def finish(self) -> bytes:
        at_end, receipt, usage = self._usage_at_end, self._receipt, self.total_usage()
        if not at_end and receipt is None:
            return DONE
        last = self.last_chunk(usage if at_end else UNSET)
        if receipt is not None:
            last.receipt = await off_loop(usage.total_tokens > MAX_INLINE_TOKENS, receipt.sealed)
        return event(last) + DONE

    async def collect(self, generation: Generation) -> None:
        await super().collect(generation)
        usage = self.total_usage()
        self._whole = await self.build(usage)
        if self._receipt is not None:
            self._whole.receipt = await off_loop(usage.total_tokens > MAX_INLINE_TOKENS, self._receipt.sealed)

    async def response(self, headers: dict[str, str]) -> Response:
        whole = self._whole
        assert whole is not None
        if self._reports_tokens and isinstance(whole.usage, Usage) and whole.usage.total_tokens > MAX_INLINE_TOKENS:
            return await large_json_response(whole, headers)
        return json_response(whole, headers=headers)


def usage_of(num_prompt: int, num_output: int, num_cached: int) -> Usage:
    return Usage(num_prompt, num_output, num_prompt + num_output, PromptTokensDetails(num_cached))


MAX_METADATA_PAIRS: Final = 16
"""This limit and the next two are OpenAI's."""
MAX_KEY_CHARS: Final = 64
MAX_VALUE_CHARS: Final = 512


def check_metadata(pairs: Mapping[str, str] | None) -> None:
    if not pairs:
        return
    longest = max(map(len, pairs)), max(map(len, pairs.values()))
    if len(pairs) > MAX_METADATA_PAIRS or longest[0] > MAX_KEY_CHARS or longest[1] > MAX_VALUE_CHARS:
        rule = f"must hold at most {MAX_METADATA_PAIRS} pairs, with keys of at most {MAX_KEY_CHARS} characters and "
        raise RequestError("metadata", f"{rule}values of at most {MAX_VALUE_CHARS} characters", len(pairs))


DEFAULT_ROWS, MAX_ROWS = 20, 100
PAGE: Final[Mapping[str, Mapping[str, Any]]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ROWS},
    "after": {"type": "string"},
}
"""Query parameters for one page of a list -> their JSON schemas."""


def page_of(http_request: Request) -> tuple[int, str | None]:
    """Return the maximum number of rows on a page, and the id of the previous page's last row, or None for page 1."""
    limit = query_integer(http_request, "limit", DEFAULT_ROWS, MAX_ROWS)
    return limit, http_request.query_params.get("after") or None


async def page_response(kind: Callable[..., Page], rows: Sequence[Any], limit: int) -> Response:
    """Return a page with the first `limit` of `rows`. Any further ones only show that there is another page."""
    shown = rows[:limit]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return await large_json_response(kind(data=shown, has_more=len(rows) > limit, first_id=first, last_id=last))
