"""Proposals by a small model, which computes beside the large one: who gets some, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from llm_serving.core.request import Request
from llm_serving.core.step import MAX_CONTINUATIONS, Continuation, window_start
from llm_serving.core.timings import Clock, monotonic
from llm_serving.errors import WorkerError
from llm_serving.log import get_logger
from llm_serving.speculation.trust import Trust

logger = get_logger(__name__)

FIRST_HITS: Final = 0.75
"""Share of right guesses that is expected before any was checked."""
ALL_MEMORY: Final = 256
"""Proposals after which one counts 1/e in what is expected of requests that have had none."""
PASS_MEMORY: Final = 32
"""Proposals after which the time of one counts 1/e."""
MAX_DEATHS: Final = 3
"""Of WorkAgents while they proposed; after that nobody is asked any more."""


class DraftModel:
    """Has the draft model of a WorkAgent go on with requests, while no step is under way.

    It sees each request's newest tokens (`core.continuation.WINDOW`) and chooses as the request is sampled. A token
    costs a pass, shared by all that are gone on with.
    """

    def __init__(
        self,
        propose: Callable[[Sequence[Continuation]], list[list[int]]],
        block_size: int,
        clock: Clock = monotonic,
    ) -> None:
        """`propose`: as `Executor.propose`; `block_size`: drafts go as far as the last block of a request."""
        self._propose = propose
        self._block_size = block_size
        self._clock = clock
        self._hits = FIRST_HITS
        self._num_deaths = 0
        self.pass_s = 0.0
        """Seconds by which a proposal is longer with a further token; 0 before the first."""

    def begin(self) -> Trust:
        """For a request of which nothing is known."""
        return Trust(self._hits)

    def takes(self, candidates: Sequence[Request]) -> list[Request]:
        """Those of them that it can go on with at a time: higher classes first, then who came first."""
        if self._num_deaths >= MAX_DEATHS:
            return []
        return sorted(candidates, key=_rank)[:MAX_CONTINUATIONS]

    def checked(self, trust: Trust, request: Request, num_guesses: int, num_right: int) -> None:
        """So many of its guesses for a request were checked, the first so many were right."""
        trust.checked(num_guesses, num_right, len(request.output_token_ids))
        for index in range(min(num_right + 1, num_guesses)):
            self._hits += ((index < num_right) - self._hits) / ALL_MEMORY

    def propose(self, asked: Sequence[tuple[Request, int]]) -> dict[Request, list[int]]:
        """What may follow in requests, each by at most so many tokens; those that were not asked about are left out.

        Raises:
            WorkerError: The WorkAgent is gone.
        """
        wanted = [(request, min(count, self._room(request))) for request, count in asked]
        wanted = [each for each in wanted if each[1] > 0]
        if not wanted:
            return {}
        began = self._clock()
        try:
            proposed = self._propose([_continuation(*each) for each in wanted])
        except WorkerError:
            self._num_deaths += 1
            if self._num_deaths == MAX_DEATHS:
                logger.warning("%d WorkAgents died while they proposed: nobody is asked any more", MAX_DEATHS)
            raise
        seconds = (self._clock() - began) / max(count for _, count in wanted)
        self.pass_s = seconds if not self.pass_s else self.pass_s + (seconds - self.pass_s) / PASS_MEMORY
        return {request: token_ids for (request, _), token_ids in zip(wanted, proposed, strict=True)}

    def _room(self, request: Request) -> int:
        """Drafts that its last block and its answer have room for."""
        return min(-request.num_tokens % self._block_size, request.sampling.max_tokens - request.num_output_tokens - 1)


def _rank(request: Request) -> tuple[int, int]:
    return request.request_class.rank, request.sequence


def _continuation(request: Request, count: int) -> Continuation:
    start, sampling = window_start(request.num_tokens_known), request.sampling
    return Continuation(
        key=request.sequence,
        start=start,
        token_ids=request.known_token_ids(start, request.num_tokens_known),
        num_wanted=count,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
    )
