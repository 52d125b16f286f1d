"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.core.request_output import PromptLogprobs, RequestOutput, TokenLogprobs
from llm_serving.core.sampling_params import RULES
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.server.answer_form import asked_form, compiled, text_of
from llm_serving.server.caller import caller_of
from llm_serving.server.choices import MAX_CHOICES, choices_of
from llm_serving.server.deadline import before
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.generation import (
    MIN_LOGPROB,
    Generation,
    encode_prompts,
    raise_on_error,
    start_generation,
    truncated,
)
from llm_serving.server.idempotency.lookup import arrival
from llm_serving.server.knock import knock
from llm_serving.server.off_loop import INLINE_TOKENS, off_loop
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
from llm_serving.server.prompt_items import Item, prompt_items
from llm_serving.server.prompt_logprobs import check_prompt_logprobs, check_size, prompt_answer
from llm_serving.server.receipts import ReceiptDraft, begin_receipt
from llm_serving.server.sampling import bad_words, sampling_params
from llm_serving.server.schemas import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Usage
from llm_serving.server.streaming import event
from llm_serving.text.tokenizer.detokenizer import IncrementalDetokenizer
from llm_serving.text.tokenizer.tokenizer import Tokenizer

PATH: Final = "/v1/completions"
DEFAULT_MAX_TOKENS: Final = 16


async def create_completion(engine: AsyncEngine, http_request: Request) -> Response:
    """Continues one or several prompts, `n` times each."""
    request = await read_request(engine, http_request, CompletionRequest)
    return await answer_completion(engine, http_request, request)


async def answer_completion(engine: AsyncEngine, http_request: Request, request: CompletionRequest) -> Response:
    """Answers a request that has come, or that was accepted and comes again."""
    streamed_usage = check_stream_options(request)
    caller = caller_of(engine.config, http_request, request)
    items = await prompt_items(request.prompt, "prompt", MAX_CHOICES, "prompts")
    choices = choices_of(request, len(items))
    num_streams = choices.n * len(items)
    async with arrival(engine, http_request, request, caller, route=PATH, prefix="cmpl", num_streams=num_streams) as (
        identity,
        turn,
    ):
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        words = await off_loop(bool(request.bad_words), lambda: bad_words(engine, request.bad_words))
        field, of_prompts = _asked_of_prompts(request)
        sampling = sampling_params(
            request,
            defaults=engine.sampling_defaults,
            least_tokens=1 if request.use_beam_search else 0,
            max_tokens=max_tokens,
            bad_words=words,
            prompt_logprobs=of_prompts,
        )
        form = asked_form(request)
        if of_prompts is not None:
            check_prompt_logprobs(request, field, choices)
        entry = await knock(
            engine,
            caller,
            items,
            max_tokens,
            names={"n": choices.counted_by if choices.best_of > 1 else "prompt"},
            num_each=choices.best_of,
            truncates=request.truncate_prompt_tokens is not None,
            known=turn.known,
        )
        whole = await encode_prompts(engine, items, request.add_special_tokens is not False)
        prompts = [truncated(engine, prompt, request.truncate_prompt_tokens, max_tokens) for prompt in whole]
        check_size(prompts, sampling, field, choices.n)
        constraint = await before(caller.deadline, engine.clock, compiled(engine, form, caller.source))
        sampling = replace(sampling, constraint=text_of(constraint))
        items = [
            item if len(prompt) == len(all_of_it) else prompt
            for item, prompt, all_of_it in zip(items, prompts, whole, strict=True)
        ]
        receipt = await begin_receipt(engine, http_request, request, identity.id, identity.created)
        generation = await start_generation(
            entry,
            prompts,
            [sampling] * len(prompts),
            choices=choices,
            request_id=identity.request_id,
            constraint=constraint,
            turn=turn,
            receipt=receipt,
        )
        answer = _Answer(engine.tokenizer, request, identity, streamed_usage, items, prompts, choices.n, receipt)
        return await respond(http_request, request, generation, answer, identity, turn)


def _asked_of_prompts(request: CompletionRequest) -> tuple[str, int | None]:
    """The field by which log-probabilities of prompts are asked for, and how many of the most likely tokens.

    An echo comes with those of its tokens, if there are any.
    """
    own, echoed = request.prompt_logprobs, request.logprobs if request.echo else None
    if echoed is None:
        return "prompt_logprobs", own
    RULES["logprobs"].checked("logprobs", echoed)
    return "echo and logprobs", echoed if own is None else max(own, echoed)


class _Place:
    """Between two tokens of a text, in characters from its beginning: of an incomplete one, where that begins.

    Args:
        text: Makes the text of its tokens.
    """

    def __init__(self, text: IncrementalDetokenizer) -> None:
        self._text = text
        self.offset = 0

    def pass_by(self, token_id: int) -> None:
        self.offset += len(self._text.add([token_id]))


class _Answer:
    """Puts the pieces of a generation into the form of the protocol."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: CompletionRequest,
        identity: Identity,
        streamed_usage: StreamedUsage,
        items: Sequence[Item],
        prompts: Sequence[list[int]],
        n: int,
        receipt: ReceiptDraft | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._identity = identity
        self._items = items
        self._prompts = prompts
        self._n = n
        self._receipt = receipt
        self._streamed_usage = streamed_usage
        self._silent_pieces = bool(
            request.logprobs is not None or request.return_token_ids or streamed_usage.in_every_piece
        )
        """Whether pieces without a text tell something."""
        self._usage = UsageCounter(n)
        self._started: set[int] = set()
        """Choices of which something has been sent."""
        self._places: dict[int, _Place] = {}
        """Of each choice, where its next token begins."""

    def _echo(self, index: int) -> str:
        """The text of the prompt, where the answer shall begin with it."""
        if not self._request.echo:
            return ""
        item = self._items[index // self._n]
        return item if isinstance(item, str) else self._tokenizer.decode(item)

    async def whole(self, generation: Generation) -> Completion:
        choices = [
            CompletionChoice(
                index=index,
                text="",
                logprobs=None if self._request.logprobs is None else CompletionLogprobs([], [], [], []),
                token_ids=[] if self._request.return_token_ids else UNSET,
                prompt_token_ids=self._prompts[index // self._n] if self._request.return_token_ids else UNSET,
            )
            for index in range(len(self._prompts) * self._n)
        ]
        texts = [[self._echo(choice.index)] for choice in choices]
        told: dict[int, PromptLogprobs] = {}
        async for index, output in generation.outputs():
            raise_on_error(output)
            choice = choices[index]
            texts[index].append(output.text)
            if output.prompt_logprobs is not None:
                told[index // self._n] = output.prompt_logprobs
            if choice.token_ids is not UNSET:
                choice.token_ids.extend(output.token_ids)
            if choice.logprobs is not None:
                add = partial(self._add_logprobs, choice.logprobs, index, output.logprobs)
                await off_loop(len(output.logprobs) > INLINE_TOKENS, add)
            if output.finished:
                choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
            self._usage.add(index, output)
        for choice in choices:
            choice.text = "".join(texts[choice.index])
        for index, prompt in enumerate(self._prompts):
            of_prompt = choices[index * self._n : (index + 1) * self._n]
            tell = partial(self._tell_of_prompt, of_prompt, prompt, told.get(index))
            await off_loop(len(prompt) > INLINE_TOKENS, tell)
        usage = self._usage.total()
        completion = self._completion(choices, usage)
        if self._receipt is not None:
            completion.receipt = await off_loop(tells_much(usage), self._receipt.sealed)
        return completion

    def _tell_of_prompt(
        self, choices: Sequence[CompletionChoice], prompt: list[int], told: PromptLogprobs | None
    ) -> None:
        """Adds to the choices of a prompt what is to be told of it."""
        request = self._request
        if request.prompt_logprobs is not None:
            answer = prompt_answer(self._tokenizer, told, request.prompt_logprobs)
            for choice in choices:
                choice.prompt_logprobs = answer
        if not request.echo or request.logprobs is None:
            return
        offset = len(self._echo(choices[0].index))
        text, tokens = self._shown(prompt[0]), [] if told is None else told.tokens(request.logprobs)
        for choice in choices:
            echoed, generated = CompletionLogprobs([text], [None], [None], [0]), choice.logprobs
            assert generated is not None
            place = _Place(IncrementalDetokenizer(self._tokenizer))
            place.pass_by(prompt[0])
            self._extend(echoed, tokens, place)
            echoed.tokens += generated.tokens
            echoed.token_logprobs += generated.token_logprobs
            echoed.top_logprobs += generated.top_logprobs
            echoed.text_offset += [offset + each for each in generated.text_offset]
            choice.logprobs = echoed

    def piece(self, index: int, output: RequestOutput) -> bytes:
        raise_on_error(output)
        request = self._request
        self._usage.add(index, output)
        first = index not in self._started
        text = self._echo(index) + output.text if first else output.text
        if not (text or self._silent_pieces or output.finished):
            return b""
        self._started.add(index)
        choice = CompletionChoice(
            index=index, text=text, finish_reason=output.finish_reason, stop_reason=output.stop_reason
        )
        if request.logprobs is not None:
            choice.logprobs = CompletionLogprobs([], [], [], [])
            self._add_logprobs(choice.logprobs, index, output.logprobs)
        if request.return_token_ids:
            choice.token_ids = list(output.token_ids)
            if first:
                choice.prompt_token_ids = self._prompts[index // self._n]
        return event(self._completion([choice], self._streamed_usage.of_piece(output)))

    async def end(self) -> bytes:
        piece = partial(self._completion, [])
        return await last_events(self._streamed_usage, self._usage.total(), self._receipt, piece)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None = UNSET) -> Completion:
        identity = self._identity
        return Completion(id=identity.id, created=identity.created, model=identity.model, choices=choices, usage=usage)

    def _shown(self, token_id: int) -> str:
        """A token, as log-probabilities name it."""
        return (
            token_as_id(token_id) if self._request.return_tokens_as_token_ids else self._tokenizer.token_text(token_id)
        )

    def _add_logprobs(self, target: CompletionLogprobs, index: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Adds tokens of a choice to what has been told of its tokens."""
        if (place := self._places.get(index)) is None:
            skips = self._request.skip_special_tokens is not False
            prompt = self._prompts[index // self._n]
            place = _Place(IncrementalDetokenizer(self._tokenizer, prompt, skip_special_tokens=skips))
            self._places[index] = place
        self._extend(target, logprobs, place)

    def _extend(self, target: CompletionLogprobs, logprobs: Sequence[TokenLogprobs], place: _Place) -> None:
        """Adds tokens of which the first begins at a place, and goes on to the end of the last."""
        shown = self._shown
        for token in logprobs:
            text = shown(token.token_id)
            logprob = max(token.logprob, MIN_LOGPROB)
            top = {
                shown(token_id): max(value, MIN_LOGPROB)
                for token_id, value in zip(token.top_token_ids, token.top_logprobs, strict=True)
            }
            target.tokens.append(text)
            target.token_logprobs.append(logprob)
            target.top_logprobs.append(top | {text: logprob})
            target.text_offset.append(place.offset)
            place.pass_by(token.token_id)


ENDPOINTS: Final = (
    Endpoint("POST", PATH, create_completion, "Continue a prompt", body=CompletionRequest, answer=Completion),
)
