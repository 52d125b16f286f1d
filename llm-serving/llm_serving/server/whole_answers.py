"""Answers in one piece: what is made of each is held until all of it is there, and that is bounded.

A stream tells its pieces and forgets them. A whole answer grows as long as it is computed: hundreds of choices, with
twenty likely tokens beside each of theirs, come to gigabytes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from starlette.requests import Request

from llm_serving.core.request_output import RequestOutput
from llm_serving.errors import LLMServingError, RequestError, UnavailableError
from llm_serving.server.caller import source_of
from llm_serving.server.generation import Generation
from llm_serving.server.streaming import complete

KEY: Final = "serving_config.max_buffered_response_bytes"
PIECE_BYTES, VALUE_BYTES = 128, 256
"""Of memory that a piece takes beside its text, and a log-probability with the token it is told of: where that has its
bytes in a list beside it, which is most."""
RETRY_AFTER_S: Final = 1.0

T = TypeVar("T")


class Holding:
    """What is held of one answer.

    Args:
        answers: All of them.
        source: Who answers for it.
        give_up: Ends the work on it.
    """

    def __init__(self, answers: WholeAnswers, source: str, give_up: Callable[[], None]) -> None:
        self._answers = answers
        self.source = source
        self._give_up = give_up
        self.failure: LLMServingError | None = None
        """Why it has ended."""
        self.num_bytes = 0

    def add(self, piece: RequestOutput) -> None:
        """A piece has come. Raises LLMServingError where that was too much."""
        self._answers.grow(self, bytes_held(piece))
        if self.failure is not None:
            raise self.failure

    def end(self, error: LLMServingError) -> None:
        """It makes room for others."""
        self.failure = error
        self._give_up()


class WholeAnswers:
    """The answers that are being made. It belongs to the event loop.

    Where they hold too much, the largest one ends of whoever holds most.

    Args:
        max_bytes: Of all together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._holdings: set[Holding] = set()
        self._of_source: Counter[str] = Counter()
        self.num_bytes = 0

    def begin(self, source: str, give_up: Callable[[], None]) -> Holding:
        """An answer that holds nothing yet; `release` it in the end."""
        holding = Holding(self, source, give_up)
        self._holdings.add(holding)
        return holding

    def release(self, holding: Holding) -> None:
        """It holds nothing any more; does nothing where that was done."""
        if holding in self._holdings:
            self._holdings.remove(holding)
            self.num_bytes -= holding.num_bytes
            self._of_source[holding.source] -= holding.num_bytes
            if not self._of_source[holding.source]:
                del self._of_source[holding.source]

    def grow(self, holding: Holding, num_bytes: int) -> None:
        """It holds so many bytes more, unless it has ended."""
        if holding not in self._holdings:
            return
        holding.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._of_source[holding.source] += num_bytes
        while self.num_bytes > self.max_bytes:
            [(source, _)] = self._of_source.most_common(1)
            largest = max((each for each in self._holdings if each.source == source), key=lambda each: each.num_bytes)
            self.release(largest)
            largest.end(self._error(largest))

    def _error(self, largest: Holding) -> LLMServingError:
        if largest.num_bytes > self.max_bytes:
            rule = f"must ask for an answer that takes at most {self.max_bytes} bytes of memory ({KEY})"
            return RequestError("body", f"{rule}, or for a stream")
        return UnavailableError(f"answers in one piece hold more than {self.max_bytes} bytes ({KEY})", RETRY_AFTER_S)


def bytes_held(piece: RequestOutput) -> int:
    """What an answer takes for it, about."""
    size = PIECE_BYTES + len(piece.text) + sum(map(bytes_held, piece.beams))
    if piece.logprobs:
        size += VALUE_BYTES * sum(1 + len(token.top_token_ids) for token in piece.logprobs)
    if (of_prompt := piece.prompt_logprobs) is not None:
        size += VALUE_BYTES * (len(of_prompt) + of_prompt.top_token_ids.size)
    return size if piece.vector is None else size + piece.vector.nbytes


async def held(http_request: Request, generation: Generation, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which puts the pieces of a generation together.

    Raises:
        RequestError: The answer is larger than all may be together.
        UnavailableError: All of them are, and it is the largest of whoever has most.
    """
    answers = http_request.app.whole_answers
    assert isinstance(answers, WholeAnswers)
    task = asyncio.current_task()
    assert task is not None

    def give_up() -> None:
        if asyncio.current_task() is not task:
            task.cancel()

    holding = answers.begin(source_of(http_request), give_up)
    generation.tell_pieces(holding.add)
    try:
        result = await work
        if holding.failure is not None:
            await asyncio.sleep(0)  # it was given up, and has waited for nothing since
        return result
    except asyncio.CancelledError:
        if holding.failure is not None and task.uncancel() == 0:
            raise holding.failure from None
        raise
    finally:
        holding.failure = None  # it refers to what refers to it
        generation.tell_pieces(None)
        answers.release(holding)


async def complete_whole(http_request: Request, generation: Generation, work: Coroutine[Any, Any, T]) -> T:
    """As `held`; the generation is closed at the end, whatever the end.

    Raises:
        ClientGoneError: The client left before; the work was cancelled.
    """
    return await complete(http_request.receive, generation, held(http_request, generation, work))
