"""Routing policies. Each is a function that chooses one of several replicas for a request."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final, NamedTuple

from llm_serving.core.enums import RoutingName

MIN_MATCH: Final = 0.1
"""Minimum cached fraction of a prompt for which a replica counts as a match, as in Ray Serve."""
MAX_IMBALANCE: Final = 16
"""Maximum difference of unfinished requests between replicas at which `prefix_affinity` considers prefixes."""
MAX_COMPARED: Final = 8
"""Maximum number of replicas whose TTFT is predicted: half by longest cached prefix, the rest by lowest load."""
OTHERS_WEIGHT: Final = 1 / 3
"""Weight of the delay of other requests relative to the delay of the request itself (docs/results/routing.md).

With 1, requests follow a cached prefix into queues that are seconds longer. With 0, every replica recomputes prefixes.
"""
OTHERS_WEIGHT_UNMATCHED: Final = 1 / 10
"""`OTHERS_WEIGHT` if no replica has a match. It is lower, because then all replicas compute about the same amount."""


class Candidate(NamedTuple):
    replica: int
    num_unfinished: int
    num_prompt_tokens: int
    num_cached_tokens: int
    """Number of prompt tokens that the replica has computed, or computes for other requests."""
    num_queued_tokens: int
    num_used_blocks: int
    block_size: int
    token_s: float
    """Measured seconds by which a token prolongs a step, or 0 if too few steps were measured."""

    @property
    def prompt_s(self) -> float:
        return (self.num_prompt_tokens - self.num_cached_tokens) * self.token_s


@dataclass(eq=False, slots=True)
class Candidates:
    """Replicas to choose from, at least one. A replica's load is computed only when a policy reads it."""

    _replicas: Sequence[int]
    _by_load: Sequence[tuple[int, int]]
    """(Number of unfinished requests, replica), ascending."""
    _cached: Mapping[int, int]
    """Replica -> cached tokens of the prompt."""
    _candidate_of: Callable[[int], Candidate]
    _is_available: Callable[[int], bool]
    _latest: int
    """Replica of the latest request, or -1."""

    def __iter__(self) -> Iterator[Candidate]:
        return map(self._candidate_of, filter(self._is_available, self._replicas))

    def by_load(self) -> Iterator[Candidate]:
        return (self._candidate_of(replica) for _, replica in self._by_load if self._is_available(replica))

    def most_loaded(self) -> Candidate:
        by_load = reversed(self._by_load)
        return next(self._candidate_of(replica) for _, replica in by_load if self._is_available(replica))

    def by_prefix(self) -> Iterator[Candidate]:
        """Iterate over the replicas with cached tokens, most tokens first. Among equals, the least loaded is first."""
        ranked = sorted(self._cached, key=self._cached.__getitem__, reverse=True)  # a stable sort
        return map(self._candidate_of, filter(self._is_available, ranked))

    def after_latest(self) -> Candidate:
        start = bisect_right(self._replicas, self._latest)
        indices = chain(self._replicas[start:], self._replicas[:start])
        return next(self._candidate_of(each) for each in indices if self._is_available(each))


PredictTtft = Callable[[Candidate], float | None]
"""Returns the predicted seconds until the first token of the request on a replica, or None if no speed is measured."""


RoutingPolicy = Callable[[Candidates, PredictTtft], Candidate]
"""Chooses one of the candidates. The choice never changes an answer."""


def load_key(candidate: Candidate) -> tuple[int, int]:
    return candidate.num_unfinished, candidate.replica


def block_cost(candidates: Candidates, predict: PredictTtft) -> Candidate:
    """Choose the replica with the lowest cost, like NVIDIA Dynamo's KV router. The cost is twice the number of blocks
    to compute, for this request and the queued ones, plus the blocks in use.
    """

    def cost(candidate: Candidate) -> float:
        uncached = candidate.num_prompt_tokens - candidate.num_cached_tokens
        num_new = (candidate.num_queued_tokens + uncached) / candidate.block_size
        return 2 * num_new + candidate.num_used_blocks

    return min(candidates, key=lambda each: (cost(each), *load_key(each)))


def least_loaded(candidates: Candidates, predict: PredictTtft) -> Candidate:
    return next(candidates.by_load())


def prefix_affinity(candidates: Candidates, predict: PredictTtft) -> Candidate:
    """Choose the longest cached prefix while loads are balanced, else the least loaded replica, as Ray Serve does."""
    least, best = next(candidates.by_load()), next(candidates.by_prefix(), None)
    is_balanced = candidates.most_loaded().num_unfinished - least.num_unfinished <= MAX_IMBALANCE
    return best if best is not None and is_balanced and _is_match(best) else least


def _is_match(candidate: Candidate) -> bool:
    return candidate.num_cached_tokens >= MIN_MATCH * candidate.num_prompt_tokens


def predicted_ttft(candidates: Candidates, predict: PredictTtft) -> Candidate:
    """Choose the replica with the lowest cost.

    The cost is the predicted TTFT plus a fraction of the time by which this prompt delays the replica's other requests.
    So a cached prefix counts little on an idle replica and much on a busy one. The fraction is small, because most
    other requests are decoding. Until a replica has measured enough steps, `prefix_affinity` decides.
    """
    cached = list(islice(candidates.by_prefix(), MAX_COMPARED // 2))
    compared = list(islice(candidates.by_load(), MAX_COMPARED + 1))
    if len(compared) > MAX_COMPARED:
        replicas = [each.replica for each in cached]
        compared = [*cached, *(each for each in compared if each.replica not in replicas)][:MAX_COMPARED]
    others_weight = OTHERS_WEIGHT if cached and _is_match(cached[0]) else OTHERS_WEIGHT_UNMATCHED
    costs = [
        (seconds + others_weight * each.num_unfinished * each.prompt_s, load_key(each), each)
        for each in compared
        if (seconds := predict(each)) is not None
    ]
    return min(costs)[2] if costs else prefix_affinity(candidates, predict)


def round_robin(candidates: Candidates, predict: PredictTtft) -> Candidate:
    return candidates.after_latest()


ROUTING_POLICIES: Final[dict[str, RoutingPolicy]] = {
    RoutingName.PREDICTED_TTFT: predicted_ttft,
    RoutingName.PREFIX_AFFINITY: prefix_affinity,
    RoutingName.BLOCK_COST: block_cost,
    RoutingName.LEAST_LOADED: least_loaded,
    RoutingName.ROUND_ROBIN: round_robin,
}
WITHOUT_PREFIXES: Final = (RoutingName.LEAST_LOADED, RoutingName.ROUND_ROBIN)
"""Policies that do not read `num_cached_tokens`. No prompt blocks are hashed for them."""
