"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.core.request_output import PromptLogprobs, RequestOutput, TokenLogprobs
from llm_serving.core.sampling_params import RULES
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.server.endpoint import Endpoints
from llm_serving.server.generation import pipeline
from llm_serving.server.generation.events import TextEvents, event
from llm_serving.server.generation.logprobs import (
    MIN_LOGPROB,
    check_prompt_logprobs,
    check_prompt_logprobs_size,
    prompt_token_logprobs,
)
from llm_serving.server.generation.response import respond
from llm_serving.server.generation.sampling import MAX_CHOICES, bad_words, choices_of, sampling_params
from llm_serving.server.generation.structured_output import structured_output_of
from llm_serving.server.parsing.body import read_fields
from llm_serving.server.parsing.offload import INLINE_TOKENS, off_loop
from llm_serving.server.protocols.openai.requests import OpenAIResponseBuilder, check_stream_options
from llm_serving.server.protocols.openai.schemas import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Usage,
)
from llm_serving.text.tokenizer.detokenizer import IncrementalDetokenizer

PATH: Final = "/v1/completions"
DEFAULT_MAX_TOKENS: Final = 16

ENDPOINTS: Final = Endpoints()


@ENDPOINTS.add("POST", PATH, "Continue a prompt", body=CompletionRequest, answer=Completion)
async def create_completion(engine: AsyncEngine, http_request: Request) -> Response:
    body = await read_fields(engine, http_request, CompletionRequest)
    return await respond_to_completion(engine, http_request, body)


async def respond_to_completion(engine: AsyncEngine, http_request: Request, body: CompletionRequest) -> Response:
    """Respond to a new request, or continue the stream of an earlier request that the client resumes."""
    check_stream_options(body)
    request = _CompletionRequest(engine, http_request, body)
    request.prompts = await pipeline.read_prompts(body.prompt, "prompt", MAX_CHOICES, "prompts")
    request.num_prompts = len(request.prompts)
    request.choices = choices_of(body, request.num_prompts)
    started = await pipeline.start_generation(request)
    return await respond(http_request, started, CompletionBuilder(request, started), stream=bool(body.stream))


class _CompletionRequest(pipeline.ProtocolRequest):
    id_prefix = "cmpl"
    route = PATH

    body: CompletionRequest
    prompts: list[pipeline.Prompt]

    async def prepare(self) -> pipeline.PrecheckInput:
        engine, body, choices = self.engine, self.body, self.choices
        self._max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        self._prompt_field, prompt_logprobs = "prompt_logprobs", body.prompt_logprobs
        if body.echo and body.logprobs is not None:  # also requests the logprobs of the echoed tokens
            RULES["logprobs"].checked("logprobs", body.logprobs)
            self._prompt_field = "echo and logprobs"
            prompt_logprobs = body.logprobs if prompt_logprobs is None else max(prompt_logprobs, body.logprobs)
        self._sampling = sampling_params(
            body,
            defaults=engine.sampling_defaults,
            least_tokens=1 if body.use_beam_search else 0,
            max_tokens=self._max_tokens,
            bad_words=await bad_words(engine, body.bad_words) if body.bad_words else (),
            prompt_logprobs=prompt_logprobs,
        )
        self._output = structured_output_of(body)
        if prompt_logprobs is not None:
            check_prompt_logprobs(body, self._prompt_field, choices)
        return pipeline.PrecheckInput(
            self.prompts,
            self._max_tokens,
            {"n": choices.counted_by if choices.best_of > 1 else "prompt"},
            choices.best_of,
            truncates=body.truncate_prompt_tokens is not None,
        )

    async def encode(self) -> pipeline.EncodedRequest:
        engine, body = self.engine, self.body
        prompts = await pipeline.encode_prompts(engine, self.prompts, "prompt", body.add_special_tokens is not False)
        if body.truncate_prompt_tokens is not None:
            for index, whole in enumerate(prompts):
                truncated = pipeline.truncate_prompt(engine, whole, body.truncate_prompt_tokens, self._max_tokens)
                if len(truncated) < len(whole):
                    self.prompts[index] = prompts[index] = truncated
        if self._sampling.prompt_logprobs is not None:
            check_prompt_logprobs_size(prompts, self._sampling, self._prompt_field, self.choices.n)
        return pipeline.EncodedRequest(prompts, self._sampling, self._output)


class _TextOffset:
    """The `text_offset` of the next token: the number of characters before it. Tokens within one character share it."""

    def __init__(self, text: IncrementalDetokenizer) -> None:
        self._text = text
        self.value = 0

    def advance(self, token_id: int) -> None:
        self.value += len(self._text.add([token_id]))


class CompletionBuilder(OpenAIResponseBuilder):
    _body: CompletionRequest

    def __init__(self, request: _CompletionRequest, started: pipeline.StartedGeneration) -> None:
        super().__init__(request, request.body, started)
        self._prompts = request.prompts
        self._prompt_ids = started.prompts
        self._offsets: dict[int, _TextOffset] = {}
        self._choices: dict[int, CompletionChoice] = {}
        self._texts: dict[int, list[str]] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}

    def _echo(self, index: int) -> str:
        prompt = self._prompts[index // self._n]
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def _delta(self, index: int, output: RequestOutput) -> CompletionChoice | None:
        body = self._body
        self.record(index, output)
        is_first = index not in self._started
        text = self._echo(index) + output.text if is_first and body.echo else output.text
        if not (text or self._sends_empty_deltas or output.finish_reason is not None):
            return None
        self._started.add(index)
        delta = CompletionChoice(
            index=index, text=text, finish_reason=output.finish_reason, stop_reason=output.stop_reason
        )
        if body.logprobs is not None:
            delta.logprobs = self._logprobs(index, output.logprobs)
        if body.return_token_ids:
            delta.token_ids = list(output.token_ids)
            if is_first:
                delta.prompt_token_ids = self._prompt_ids[index // self._n]
        return delta

    def encode_delta(self, index: int, output: RequestOutput) -> bytes:
        delta, usage = self._delta(index, output), self.usage_so_far(output)
        if delta is None:
            return b""
        if not self._sends_empty_deltas and output.finish_reason is None:
            self._text_events[index] = TextEvents(
                lambda text: self._completion([CompletionChoice(index=index, text=text)], usage)
            )
        return event(self._completion([delta], usage))

    def last_chunk(self, usage: Usage | UnsetType) -> Completion:
        return self._completion([], usage)

    def fold(self, index: int, output: RequestOutput) -> None:
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index // self._n] = output.prompt_logprobs
        delta = self._delta(index, output)
        if delta is None:
            return
        self._texts.setdefault(index, []).append(delta.text)
        choice = self._choices.setdefault(index, delta)
        if choice is delta:
            return
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        if choice.token_ids is not UNSET and delta.token_ids is not UNSET:
            choice.token_ids += delta.token_ids
        if choice.logprobs is not None and delta.logprobs is not None:
            choice.logprobs = _joined(choice.logprobs, delta.logprobs)

    async def build(self, usage: Usage) -> Completion:
        choices, body = [], self._body
        for index in sorted(self._choices):
            choice = self._choices[index]
            choice.text = "".join(self._texts[index])
            choices.append(choice)
        if body.prompt_logprobs is not None or (body.echo and body.logprobs is not None):
            for index, prompt in enumerate(self._prompt_ids):
                own = choices[index * self._n : (index + 1) * self._n]
                await off_loop(len(prompt) > INLINE_TOKENS, partial(self._add_prompt_logprobs, own, index, prompt))
        return self._completion(choices, usage)

    def _add_prompt_logprobs(self, choices: Sequence[CompletionChoice], index: int, prompt: list[int]) -> None:
        body, logprobs = self._body, self._prompt_logprobs.get(index)
        if body.prompt_logprobs is not None:
            reported = prompt_token_logprobs(self._tokenizer, logprobs, body.prompt_logprobs)
            for choice in choices:
                choice.prompt_logprobs = reported
        if not body.echo or body.logprobs is None:
            return
        length = len(self._echo(choices[0].index))
        first, tokens = self.token_name(prompt[0]), [] if logprobs is None else logprobs.tokens(body.logprobs)
        for choice in choices:
            generated = choice.logprobs
            assert generated is not None
            offset = _TextOffset(IncrementalDetokenizer(self._tokenizer))
            offset.advance(prompt[0])
            echoed = CompletionLogprobs([first], [None], [None], [0])
            self._extend(echoed, tokens, offset)
            generated.text_offset = [length + each for each in generated.text_offset]
            choice.logprobs = _joined(echoed, generated)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        identity = self._identity
        return Completion(id=identity.id, created=identity.created, model=identity.model, choices=choices, usage=usage)

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        if (offset := self._offsets.get(index)) is None:
            skips = self._body.skip_special_tokens is not False
            prompt = self._prompt_ids[index // self._n]
            offset = _TextOffset(IncrementalDetokenizer(self._tokenizer, prompt, skip_special_tokens=skips))
            self._offsets[index] = offset
        target = CompletionLogprobs([], [], [], [])
        self._extend(target, logprobs, offset)
        return target

    def _extend(self, target: CompletionLogprobs, logprobs: Sequence[TokenLogprobs], offset: _TextOffset) -> None:
        """Append logprobs of consecutive tokens to `target`. `offset` is at the first token; move it past the last."""
        name = self.token_name
        for token in logprobs:
            text, logprob = name(token.token_id), max(token.logprob, MIN_LOGPROB)
            top = {
                name(token_id): max(value, MIN_LOGPROB)
                for token_id, value in zip(token.top_token_ids, token.top_logprobs, strict=True)
            }
            target.tokens.append(text)
            target.token_logprobs.append(logprob)
            target.top_logprobs.append(top | {text: logprob})
            target.text_offset.append(offset.value)
            offset.advance(token.token_id)


def _joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    first.tokens += second.tokens
    first.token_logprobs += second.token_logprobs
    first.top_logprobs += second.top_logprobs
    first.text_offset += second.text_offset
    return first
