"""The draft-model proposer: a small model proposes draft tokens for the served model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from llm_serving.core.enums import Proposer
from llm_serving.core.request import Request
from llm_serving.core.step import MAX_DRAFT_REQUESTS, DraftRequest, draft_window_start
from llm_serving.core.timings import Clock, monotonic
from llm_serving.errors import WorkerError
from llm_serving.kvcache import BlockManager
from llm_serving.log import get_logger
from llm_serving.speculation.statistics import MovingAverage, RequestStatistics, updated_rate

logger = get_logger(__name__)

FIRST_ACCEPTANCE_RATE: Final = 0.75
GLOBAL_RATE_MEMORY: Final = 256
"""Time constant, in draft tokens, of the moving average of the acceptance rate over all requests."""
PASS_MEMORY: Final = 32
MAX_WORKER_DEATHS: Final = 3
"""The draft model is switched off after the WorkAgent has exited this many times during a proposal."""

_DESCRIPTIONS: Final = {Proposer.DRAFT_MODEL: "the draft model", Proposer.MTP: "the layer for multi-token prediction"}


class DraftModelProposer:
    """Proposes draft tokens with a draft model or a layer for multi-token prediction, while no step is in flight.

    The draft model reads the last `DRAFT_WINDOW` tokens of each request, and samples with the request's parameters.
    Each pass of the model computes one token of each request. A draft does not extend beyond its request's last block.
    """

    def __init__(
        self,
        propose: Callable[[Sequence[DraftRequest]], list[list[int]]],
        block_size: int,
        clock: Clock = monotonic,
        blocks: BlockManager | None = None,
    ) -> None:
        """`propose`: `Executor.propose`. `blocks`: KV blocks that multi-token prediction reads, or None."""
        self.proposer = Proposer.DRAFT_MODEL if blocks is None else Proposer.MTP
        self._propose = propose
        self._block_size = block_size
        self._blocks = blocks
        self._clock = clock
        self._num_deaths = 0
        self._pass = MovingAverage(PASS_MEMORY)
        self.acceptance_rate = FIRST_ACCEPTANCE_RATE

    @property
    def pass_s(self) -> float:
        """Seconds of a pass, which computes one token of each request; 0 before the first proposal."""
        return self._pass.value

    def select(self, candidates: Sequence[Request]) -> list[Request]:
        """Return the first `MAX_DRAFT_REQUESTS` candidates, ordered by class, then by arrival."""
        if self._num_deaths >= MAX_WORKER_DEATHS:
            return []
        return sorted(candidates, key=_rank)[:MAX_DRAFT_REQUESTS]

    def record_verified(
        self, statistics: RequestStatistics, request: Request, num_draft_tokens: int, num_accepted: int
    ) -> None:
        statistics.record_model(num_draft_tokens, num_accepted, len(request.output_token_ids))
        self.acceptance_rate = updated_rate(
            self.acceptance_rate, num_accepted, num_accepted < num_draft_tokens, GLOBAL_RATE_MEMORY
        )

    def propose(self, requested: Sequence[tuple[Request, int]]) -> dict[Request, list[int]]:
        """Return request -> draft tokens. `requested`: (request, maximum). Raise WorkerError if the WorkAgent exits."""
        counts = [(request, min(count, self._room(request))) for request, count in requested]
        counts = [each for each in counts if each[1] > 0]
        if not counts:
            return {}
        began = self._clock()
        try:
            drafts = self._propose([self._draft_request(*each) for each in counts])
        except WorkerError:
            self._num_deaths += 1
            if self._num_deaths == MAX_WORKER_DEATHS:
                text = "%s is no longer used, because the WorkAgent exited while it proposed: exits=%d"
                logger.warning(text, _DESCRIPTIONS[self.proposer], MAX_WORKER_DEATHS)
            raise
        self._pass.add((self._clock() - began) / max(count for _, count in counts))
        return {request: token_ids for (request, _), token_ids in zip(counts, drafts, strict=True)}

    def _room(self, request: Request) -> int:
        return min(-request.num_tokens % self._block_size, request.sampling.max_tokens - request.num_output_tokens - 1)

    def _draft_request(self, request: Request, count: int) -> DraftRequest:
        start, sampling = draft_window_start(request.num_tokens_known), request.sampling
        block_ids: list[int] = []
        if self._blocks is not None:
            block_ids = self._blocks.table(request.request_id).ids[start // self._block_size :].tolist()
        return DraftRequest(
            key=request.sequence,
            start=start,
            token_ids=request.known_token_ids(start, request.num_tokens_known),
            num_draft_tokens=count,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            block_ids=block_ids,
        )


def _rank(request: Request) -> tuple[int, int]:
    return request.request_class.rank, request.sequence
