"""The engine requests of one HTTP request, merged into one stream of outputs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Final, TypeVar

from starlette.types import Receive

from llm_serving.core.request import Constraint, FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.core.sampling_params import SamplingParams
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.request_stream import RequestStream
from llm_serving.errors import RequestCancelledError, RequestError, TimedOutError, UnavailableError, WorkerError
from llm_serving.server.generation.sampling import (
    ONE_CHOICE,
    ChoiceOutput,
    Choices,
    select_beams,
    select_best,
    sequences_of,
)
from llm_serving.server.idempotency.request import IdempotentRequest
from llm_serving.server.parsing.caller import HttpCaller
from llm_serving.server.parsing.errors import PREDICTED_TTFT_HEADER

SUBMITTED_AT_ONCE: Final = 16
READ_AT_ONCE: Final = 16
NO_RENAMES: Final[Mapping[str, str]] = MappingProxyType({})

T = TypeVar("T")

Select = Callable[[AsyncIterator[ChoiceOutput]], AsyncIterator[ChoiceOutput]]


@dataclass(eq=False)
class Generation:
    """The sequences of one HTTP request, merged into one stream. `aclose` aborts them; call it also after an error."""

    streams: Sequence[RequestStream]
    select: Select | None = None
    """Selects the sequences that become choices. If None, each sequence is a choice."""
    on_close: Callable[[int], None] | None = None
    """Called once, at the end, with the number of generated tokens."""
    on_read: Callable[[RequestOutput], None] | None = None
    """Called with every output, including those of sequences that are not selected."""
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    @property
    def headers(self) -> dict[str, str]:
        """Response header with the predicted TTFT in ms since the request's arrival. Empty without a prediction."""
        predicted_s = -1.0
        for stream in self.streams:
            if stream.predicted_s is not None:
                predicted_s = max(predicted_s, stream.predicted_s)
        return {PREDICTED_TTFT_HEADER: str(math.ceil(1000 * predicted_s))} if predicted_s >= 0.0 else {}

    def outputs(self) -> AsyncIterator[ChoiceOutput]:
        """Yield every output of every choice. Iterate only once."""
        merged = self._merged()
        return merged if self.select is None else self.select(merged)

    def set_fast_path(self, deliver: Callable[[RequestOutput], bool] | None) -> None:
        """Call `deliver` with each new output. If it returns True, it has sent the output to the client. Otherwise,
        `outputs` yields the output. It is not called for the final output, nor if the generation has several sequences
        or selects some of them. If `deliver` is None, turn the fast path off.
        """
        if len(self.streams) == 1 and self.select is None:
            self.streams[0].take = deliver

    def report_unread_bytes(self, listener: Callable[[int], None] | None) -> None:
        """Call `listener` with each change, such as -20, in the bytes of unread outputs. None ends the calls."""
        for stream in self.streams:
            stream.report_waiting(listener)

    async def _merged(self) -> AsyncIterator[ChoiceOutput]:
        if len(self.streams) == 1:
            async for output in self.streams[0]:
                self.streams[0].latest = output
                if self.on_read is not None:
                    self.on_read(output)
                yield ChoiceOutput(0, output)
            return
        # The queue is short: further outputs wait in the streams, which count their bytes.
        queue: asyncio.Queue[ChoiceOutput | Exception | None] = asyncio.Queue(READ_AT_ONCE)
        self._tasks = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(self.streams)]
        num_read = 0
        for _ in self._tasks:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                self.streams[item.choice].latest = item.output
                if self.on_read is not None:
                    self.on_read(item.output)
                yield item
                num_read += 1
                if num_read % READ_AT_ONCE == 0:  # reading a queue that is not empty does not suspend
                    await asyncio.sleep(0)

    async def aclose(self) -> None:
        if self.on_close is not None:
            on_close, self.on_close = self.on_close, None
            on_close(sum(each.latest.num_output_tokens for each in self.streams if each.latest is not None))
        for task in self._tasks:
            task.cancel()
        for stream in self.streams:  # before the first await, at which this task may be cancelled itself
            await stream.aclose()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _pump(index: int, stream: RequestStream, queue: asyncio.Queue[ChoiceOutput | Exception | None]) -> None:
    try:
        async for output in stream:
            await queue.put(ChoiceOutput(index, output))
    except Exception as error:  # noqa: BLE001  handed to the reader
        await queue.put(error)
    await queue.put(None)


async def submit(
    engine: AsyncEngine,
    caller: HttpCaller,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    *,
    request_id: str,
    constraint: Constraint | None = None,
    wants_vectors: bool = False,
    choices: Choices = ONE_CHOICE,
    field_names: Mapping[str, str] = NO_RENAMES,
    idempotent: IdempotentRequest | None = None,
) -> Generation:
    """Submit `choices.best_of` sequences for each prompt to the engine, or one for a beam search. The sequences of a
    prompt are forks of the first, so the prompt's KV blocks are computed once. If the engine refuses a sequence, abort
    all and raise its error. `field_names` maps field names in the engine's errors to the protocol's names.
    """
    num_prompt_tokens = sum(map(len, prompts))
    try:
        sharing = None if idempotent is None else await idempotent.sharing(prompts, sampling, choices, caller)
        sequences = [sampling] if choices == ONE_CHOICE else sequences_of(sampling, choices)
        keys = [] if sharing is None else [sharing.key + i.to_bytes(4) for i in range(len(prompts) * len(sequences))]
        admission = None
        if len(prompts) * choices.best_of > 1 and not engine.coalesced.has(keys):
            prompt_lens = [len(prompt) for prompt in prompts for _ in range(choices.best_of)]
            admission = engine.check_capacity(prompt_lens, caller, choices.best_of)
        refund: Callable[[int], None] | None = None
        if caller.quota is not None:
            num_output = choices.best_of * sampling.max_tokens * len(prompts)
            refund = caller.quota.take_tokens(num_prompt_tokens, num_output)
        streams: list[RequestStream] = []
        try:
            for prompt in prompts:
                first: RequestStream | None = None
                for params in sequences:
                    stream = engine.generate(
                        prompt,
                        params,
                        caller,
                        request_id=request_id,
                        fork_of=first,
                        beam_search=choices.beams,
                        constraint=constraint,
                        wants_vector=wants_vectors,
                        has_siblings=len(sequences) > 1,
                        admission=admission,
                        sharing=None if sharing is None else sharing._replace(key=keys[len(streams)]),
                    )
                    first = first or stream
                    streams.append(stream)
                    if len(streams) % SUBMITTED_AT_ONCE == 0:
                        await asyncio.sleep(0)  # let other requests run
            if idempotent is not None:
                await idempotent.accept()
        except BaseException:
            await Generation(streams).aclose()
            if refund is not None:
                refund(-num_prompt_tokens)  # a refused request gets its prompt tokens back as well
            raise
    except RequestError as error:
        raise error.renamed_by(field_names) from None
    select: Select | None = None
    if choices.beams is not None:
        select = partial(select_beams, choices=choices)
        refund = None if refund is None else partial(_refund_beams, refund, choices.best_of)
    elif choices.best_of > choices.n:
        select = partial(select_best, choices=choices, with_logprobs=sampling.logprobs is not None)
    generation = Generation(streams, select, on_close=refund)
    if (context := caller.context) is not None:
        context.request_id = context.request_id or streams[0].request_id
        context.num_prompt_tokens = num_prompt_tokens
        context.streams_per_prompt = len(streams) // len(prompts)
        context.streams = generation.streams
    return generation


def _refund_beams(refund: Callable[[int], None], width: int, num_generated: int) -> None:
    """Refund the unused tokens of a beam search. Each beam is charged for `num_generated`, the best one's length."""
    if num_generated:
        refund(num_generated * width)


def raise_on_failure(output: RequestOutput) -> None:
    """Raise TimedOutError, UnavailableError or WorkerError if the engine ended a request with an error."""
    if output.finish_reason is None:
        return
    if output.finish_reason is FinishReason.TIMEOUT:
        raise TimedOutError(output.error or "the deadline of the request has passed")
    if output.finish_reason is FinishReason.UNAVAILABLE:
        raise UnavailableError(output.error or "no WorkAgent can compute the request now")
    if output.finish_reason is FinishReason.ERROR:
        raise WorkerError(output.error or "the engine could not complete the request")


def raise_unless_complete(output: RequestOutput) -> None:
    """Raise the errors of `raise_on_failure`, and RequestCancelledError for an aborted request."""
    raise_on_failure(output)
    if output.finish_reason is FinishReason.ABORT:
        raise RequestCancelledError


class ClientGoneError(Exception):
    """The client closed the connection before its response was complete."""


async def run_until_client_leaves(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`. If the client disconnects, cancel the work and raise ClientGoneError. The caller must have read the
    request body before, because this function discards the parts of the body that it receives.
    """
    task = asyncio.current_task()
    assert task is not None
    has_left = has_ended = False

    async def watch_client() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        await asyncio.sleep(0)  # lets work that already has its result end
        if not has_ended:
            has_left = True
            task.cancel()

    watch = asyncio.ensure_future(watch_client())
    try:
        return await work
    except asyncio.CancelledError:
        if has_left and task.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        has_ended = True
        watch.cancel()
