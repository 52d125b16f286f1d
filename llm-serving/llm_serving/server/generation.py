"""One HTTP request as one or several requests of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Final, NamedTuple

from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.async_engine import AsyncEngine, RequestStream
from llm_serving.errors import ContextLengthError, RequestError, WorkerError
from llm_serving.server.caller import Caller
from llm_serving.server.sampling import with_choice_seed

MIN_LOGPROB: Final = -9999.0
"""JSON has no minus infinity; clients know this value from OpenAI."""
MAX_N: Final = 128
MAX_CHOICES: Final = 512
"""Most answers to one HTTP request, prompts times `n`."""
INLINE_CHARS: Final = 4096
"""Texts up to this length are tokenized on the event loop: a thread would cost more than it spares."""


class ChoiceOutput(NamedTuple):
    choice: int
    """Index of the prompt times n, plus the choice of that prompt."""
    output: RequestOutput


class Generation:
    """The streams of all choices as one stream of pieces, in the order in which they come.

    Close it when done, however it ends: what has not finished is aborted.
    """

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self._streams = streams
        self._tasks: list[asyncio.Task[None]] = []

    async def outputs(self) -> AsyncIterator[ChoiceOutput]:
        """Every piece of every choice; iterate once."""
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield ChoiceOutput(0, output)
            return
        queue: asyncio.Queue[ChoiceOutput | Exception | None] = asyncio.Queue()
        self._tasks = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(self._streams)]
        for _ in self._tasks:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for stream in self._streams:
            await stream.aclose()


async def _pump(index: int, stream: RequestStream, queue: asyncio.Queue[ChoiceOutput | Exception | None]) -> None:
    try:
        async for output in stream:
            queue.put_nowait(ChoiceOutput(index, output))
    except Exception as error:  # noqa: BLE001  handed to the reader
        queue.put_nowait(error)
    queue.put_nowait(None)


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
    engine: AsyncEngine,
    prompts: Sequence[list[int]],
    samplings: Sequence[SamplingParams],
    *,
    n: int = 1,
    request_id: str,
    caller: Caller,
) -> Generation:
    """Submits `n` requests for each prompt, all or none.

    Args:
        engine: The engine.
        prompts: Token ids of each prompt.
        samplings: For each prompt, the sampling of its first choice.
        n: Choices of each prompt.
        request_id: As the client sees it.
        caller: Who asks.

    Raises:
        LLMServingError: The engine refuses one of them; none runs then.
    """
    if check_choices(len(prompts), n) > 1:
        prompt_lens = [len(prompt) for prompt in prompts for _ in range(n)]
        engine.check_capacity(prompt_lens, priority=caller.priority, tenant=caller.tenant)
    streams: list[RequestStream] = []
    try:
        for prompt, sampling in zip(prompts, samplings, strict=True):
            for choice in range(n):
                params = with_choice_seed(sampling, choice)
                stream = engine.generate(
                    prompt,
                    params,
                    request_id=request_id,
                    priority=caller.priority,
                    tenant=caller.tenant,
                    cache_salt=caller.cache_salt,
                    exchange=caller.exchange,
                )
                streams.append(stream)
    except BaseException:
        await Generation(streams).aclose()
        raise
    return Generation(streams)


def check_choices(num_prompts: int, n: int) -> int:
    """How many answers a request asks for.

    Raises:
        RequestError: Too many.
    """
    if not 1 <= n <= MAX_N:
        raise RequestError("n", f"must be an integer from 1 to {MAX_N}", n)
    if num_prompts * n > MAX_CHOICES:
        raise RequestError("n", f"times the number of prompts must be at most {MAX_CHOICES}", num_prompts * n)
    return num_prompts * n


def raise_on_error(output: RequestOutput) -> None:
    """Raises WorkerError where the engine ended the request with an error."""
    if output.finish_reason is FinishReason.ERROR:
        raise WorkerError(output.error or "the request failed")


async def encode_text(engine: AsyncEngine, text: str, field: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text; long ones are tokenized off the event loop.

    Raises:
        ContextLengthError: The text has more characters than the longest prompt could have.
    """
    longest = engine.config.model.max_input_len * engine.tokenizer.max_token_chars
    if len(text) > longest:
        rule = f"must be at most {engine.config.model.max_input_len} tokens long, which {longest} characters exceed"
        raise ContextLengthError(field, rule, len(text))
    if len(text) <= INLINE_CHARS:
        return engine.tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(engine.tokenizer.encode, text, add_special_tokens)
