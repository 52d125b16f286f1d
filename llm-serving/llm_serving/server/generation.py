"""One HTTP request as one or several requests of the engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from llm_serving.core.constraint import Constraint
from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.request_stream import RequestStream
from llm_serving.errors import (
    ContextLengthError,
    RequestCancelledError,
    RequestError,
    TimedOutError,
    UnavailableError,
    WorkerError,
    renaming,
)
from llm_serving.server.choices import ONE_ANSWER, Choices
from llm_serving.server.error_responses import PREDICTED_TTFT_HEADER
from llm_serving.server.idempotency.request import Turn
from llm_serving.server.knock import Entry
from llm_serving.server.off_loop import off_loop
from llm_serving.server.receipts import ReceiptDraft
from llm_serving.server.sampling import sequences_of
from llm_serving.server.selection import ChoiceOutput, select_beams, select_best

MIN_LOGPROB: Final = -9999.0
"""JSON has no minus infinity; clients know this value from OpenAI."""
INLINE_CHARS: Final = 4096
"""Texts up to this length are tokenized on the event loop: a thread would cost more than it spares."""
SUBMITTED_AT_ONCE: Final = 16
"""Requests of one body, before others have their turn."""
TOLD_AT_ONCE: Final = 16
"""Pieces of several choices, before others have theirs."""

Select = Callable[[AsyncIterator[ChoiceOutput]], AsyncIterator[ChoiceOutput]]
"""From the pieces of all sequences to those of the answers."""


class Generation:
    """The streams of all choices as one stream of pieces, in the order in which they come.

    Close it when done, however it ends: what has not finished is aborted.
    """

    def __init__(
        self,
        streams: Sequence[RequestStream],
        select: Select | None = None,
        on_end: Callable[[int], None] | None = None,
    ) -> None:
        """`on_end` is told at the end how many tokens have been generated."""
        self._streams = streams
        self._select = select
        self._on_end = on_end
        self.watch: Callable[[int, RequestOutput], None] | None = None
        """Told each piece of each choice before it is given out."""
        self._on_piece: Callable[[RequestOutput], None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.newest: list[RequestOutput | None] = [None] * len(streams)
        """The newest piece of each stream."""

    @property
    def num_streams(self) -> int:
        """How many of the pieces are the last one of their choice, where all choices are told."""
        return len(self._streams)

    @property
    def headers(self) -> dict[str, str]:
        """What is known of the answer before it begins: when its first token is expected, counted from the door."""
        predicted = [stream.predicted_s for stream in self._streams if stream.predicted_s is not None]
        return {PREDICTED_TTFT_HEADER: str(math.ceil(1000 * max(predicted)))} if predicted else {}

    def outputs(self) -> AsyncIterator[ChoiceOutput]:
        """Every piece of every choice; iterate once."""
        pieces = self._pieces()
        selected = pieces if self._select is None else self._select(pieces)
        return selected if self.watch is None else _watched(selected, self.watch)

    def give_first(self, take: Callable[[int, RequestOutput], bool] | None) -> None:
        """From now on `take` is asked first whether it takes a piece that `outputs` waits for; None: nobody is.

        It gets no last piece of a choice, and none where pieces are watched, selected or those of several choices.
        """
        if len(self._streams) != 1 or self._select is not None or self.watch is not None:
            return
        newest, stream = self.newest, self._streams[0]

        def take_first(output: RequestOutput) -> bool:
            newest[0] = output
            return take is not None and take(0, output)

        stream.take = None if take is None else take_first

    def tell_waiting(self, on_waiting: Callable[[int], None] | None) -> None:
        """From now on `on_waiting` is told how many bytes more, or less, wait for whoever reads `outputs`."""
        for stream in self._streams:
            stream.tell_waiting(on_waiting)

    def tell_pieces(self, on_piece: Callable[[RequestOutput], None] | None) -> None:
        """From now on `on_piece` is told each piece that is read, also of sequences that are no answer in the end."""
        self._on_piece = on_piece

    def _read(self, index: int, output: RequestOutput) -> ChoiceOutput:
        self.newest[index] = output
        if self._on_piece is not None:
            self._on_piece(output)
        return ChoiceOutput(index, output)

    async def _pieces(self) -> AsyncIterator[ChoiceOutput]:
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield self._read(0, output)
            return
        # What does not fit waits in the streams, where it is counted.
        queue: asyncio.Queue[ChoiceOutput | Exception | None] = asyncio.Queue(TOLD_AT_ONCE)
        self._tasks = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(self._streams)]
        num_told = 0
        for _ in self._tasks:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield self._read(*item)
                num_told += 1
                if num_told % TOLD_AT_ONCE == 0:  # a queue that has something does not let others run
                    await asyncio.sleep(0)

    async def aclose(self) -> None:
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(sum(output.num_output_tokens for output in self.newest if output is not None))
        for task in self._tasks:
            task.cancel()
        for stream in self._streams:  # before the first moment at which this may be cancelled itself
            await stream.aclose()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _watched(
    pieces: AsyncIterator[ChoiceOutput], watch: Callable[[int, RequestOutput], None]
) -> AsyncIterator[ChoiceOutput]:
    async for piece in pieces:
        watch(piece.choice, piece.output)
        yield piece


async def _pump(index: int, stream: RequestStream, queue: asyncio.Queue[ChoiceOutput | Exception | None]) -> None:
    try:
        async for output in stream:
            await queue.put(ChoiceOutput(index, output))
    except Exception as error:  # noqa: BLE001  handed to the reader
        await queue.put(error)
    await queue.put(None)


class TokenPiece(NamedTuple):
    token_id: int
    logprob: float
    text: str


def token_pieces(output: RequestOutput) -> list[TokenPiece]:
    """A piece cut into its tokens, for protocols with one event a token; the last one carries the text."""
    logprobs = [token.logprob for token in output.logprobs] or [0.0] * len(output.token_ids)
    last = len(output.token_ids) - 1
    return [
        TokenPiece(token_id, max(logprob, MIN_LOGPROB), output.text if i == last else "")
        for i, (token_id, logprob) in enumerate(zip(output.token_ids, logprobs, strict=True))
    ]


async def start_generation(
    entry: Entry,
    prompts: Sequence[list[int]],
    samplings: Sequence[SamplingParams],
    *,
    choices: Choices = ONE_ANSWER,
    request_id: str,
    constraint: Constraint | None = None,
    wants_vectors: bool = False,
    receipt: ReceiptDraft | None = None,
    turn: Turn | None = None,
) -> Generation:
    """Submits `choices.best_of` requests for each prompt, all or none; a beam search is one.

    Of a prompt all but the first are forks of it: its blocks are computed and held once.

    Args:
        entry: From `knock`.
        prompts: Token ids of each prompt.
        samplings: For each prompt, the sampling of its first choice.
        choices: How many answers, and how they are found.
        request_id: As the client sees it.
        constraint: What has been compiled of the one that the samplings name.
        wants_vectors: Whether the last pieces are to have the vectors of the prompts.
        turn: Says who else gets the answers, and keeps the request for when it comes again.
        receipt: Gets what is computed, and every piece of it.

    Raises:
        LLMServingError: The engine refuses one of them; none runs then.
    """
    engine, caller, names = entry
    with renaming(names):
        if receipt is not None:
            receipt.begin(prompts, samplings[0], choices)
        sharing = None if turn is None else await turn.sharing(prompts, samplings[0], choices, caller)
        sequences = [sequences_of(sampling, choices) for sampling in samplings]
        keys = [] if sharing is None else _keys(sharing.key, sequences)
        prompt_lens = [len(prompt) for prompt in prompts for _ in range(choices.best_of)]
        admission = None
        if len(prompt_lens) > 1 and not engine.shared.has(keys):
            admission = engine.check_capacity(prompt_lens, caller, choices.best_of)
        on_end: Callable[[int], None] | None = None
        if caller.quota is not None:
            num_output = choices.best_of * sum(sampling.max_tokens for sampling in samplings)
            on_end = caller.quota.take_tokens(sum(map(len, prompts)), num_output)
        select: Select | None = None
        if choices.beams is not None:
            select = partial(select_beams, choices=choices)
        elif choices.best_of > choices.n:
            select = partial(select_best, choices=choices, with_logprobs=samplings[0].logprobs is not None)
        streams: list[RequestStream] = []
        try:
            for prompt, of_prompt in zip(prompts, sequences, strict=True):
                first: RequestStream | None = None
                for params in of_prompt:
                    stream = engine.generate(
                        prompt,
                        params,
                        caller,
                        request_id=request_id,
                        fork_of=first,
                        beam_search=choices.beams,
                        constraint=constraint,
                        wants_vector=wants_vectors,
                        has_siblings=len(of_prompt) > 1,
                        admission=admission,
                        sharing=None if sharing is None else sharing._replace(key=keys[len(streams)]),
                    )
                    first = first or stream
                    streams.append(stream)
                    if len(streams) % SUBMITTED_AT_ONCE == 0:
                        await asyncio.sleep(0)  # others are served meanwhile
            if turn is not None:
                await turn.accept()
        except BaseException:
            await Generation(streams).aclose()
            if on_end is not None:
                on_end(-sum(map(len, prompts)))  # whoever is refused gets its prompts back as well
            raise
        if on_end is not None and choices.beams is not None:
            on_end = partial(_end_of_beams, on_end, choices.best_of)
        generation = Generation(streams, select, on_end)
        generation.watch = None if receipt is None else receipt.add
        if (note := caller.note) is not None:
            note.request_id = note.request_id or streams[0].request_id
            note.num_prompt_tokens = sum(map(len, prompts))
            note.streams_per_prompt = len(streams) // len(prompts)
            note.outputs = generation.newest
        return generation


def _keys(key: bytes, sequences: Sequence[Sequence[SamplingParams]]) -> list[bytes]:
    """By which each sequence is shared."""
    return [key + number.to_bytes(4) for number in range(sum(map(len, sequences)))]


def _end_of_beams(on_end: Callable[[int], None], width: int, num_generated: int) -> None:
    """A beam search tells the tokens of its best beam, at its end: each beam has about as many, and whoever leaves
    before gets nothing back."""
    if num_generated:
        on_end(num_generated * width)


def raise_on_error(output: RequestOutput) -> None:
    """Raises what the engine ended the request with: TimedOutError where its deadline passed, UnavailableError where
    nothing could compute it any more, otherwise WorkerError."""
    if output.finish_reason is None:
        return
    if output.finish_reason is FinishReason.TIMEOUT:
        raise TimedOutError(output.error or "the deadline of the request has passed")
    if output.finish_reason is FinishReason.UNAVAILABLE:
        raise UnavailableError(output.error or "nothing can compute the request at this moment")
    if output.failed:
        raise WorkerError(output.error or "the request failed")


def raise_unless_whole(output: RequestOutput) -> None:
    """As `raise_on_error`; raises RequestCancelledError too, for protocols that have no word for an end which somebody
    else has made."""
    raise_on_error(output)
    if output.finish_reason is FinishReason.ABORT:
        raise RequestCancelledError


def truncated(engine: AsyncEngine, prompt: list[int], count: int | None, max_tokens: int) -> list[int]:
    """The end of a prompt.

    Args:
        engine: Says what fits.
        prompt: Token ids.
        count: Most tokens to keep; -1: as many as fit beside `max_tokens`, None: all.
        max_tokens: Most tokens to generate.

    Raises:
        RequestError: `count` is something else.
    """
    if count is None:
        return prompt
    if count == -1:
        count = max(1, min(engine.config.model.max_input_len, engine.max_model_len - max_tokens))
    elif count < 1:
        raise RequestError("truncate_prompt_tokens", "must be -1 or an integer of at least 1", count)
    return prompt[-count:]


async def encode_text(engine: AsyncEngine, text: str, field: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text; long ones are tokenized off the event loop.

    Raises:
        ContextLengthError: The text has more characters than the longest prompt could have.
    """
    check_length(engine, text, field)
    return await off_loop(len(text) > INLINE_CHARS, lambda: engine.tokenizer.encode(text, add_special_tokens))


async def encode_prompts(
    engine: AsyncEngine, items: Sequence[str | list[int]], add_special_tokens: bool = True
) -> list[list[int]]:
    """Token ids of several prompts, some of which may be ids already; many are tokenized off the event loop.

    Raises:
        ContextLengthError: A text has more characters than the longest prompt could have.
    """
    texts = [item for item in items if isinstance(item, str)]
    for text in texts:
        check_length(engine, text, "prompt")

    def encode() -> list[list[int]]:
        tokenizer = engine.tokenizer
        return [tokenizer.encode(item, add_special_tokens) if isinstance(item, str) else item for item in items]

    return await off_loop(sum(map(len, texts)) + INLINE_CHARS // 64 * len(texts) > INLINE_CHARS, encode)


def check_length(engine: AsyncEngine, text: str, field: str) -> None:
    longest = engine.config.model.max_input_len * engine.tokenizer.max_token_chars
    if len(text) > longest:
        rule = f"must be at most {engine.config.model.max_input_len} tokens long, which {longest} characters exceed"
        raise ContextLengthError(field, rule, len(text))
