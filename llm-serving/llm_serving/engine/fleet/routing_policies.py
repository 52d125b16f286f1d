"""Routing policies: each takes figures of the replicas and returns one of them; `ROUTINGS` names them all.

- `block_cost`: fewest blocks to compute and to hold, both weighted alike, as the KV router of NVIDIA Dynamo does by
  default (https://docs.nvidia.com/dynamo/design-docs/router-design).
- `least_loaded`: fewest unfinished requests.
- `prefix_affinity`: the longest cached prefix of the prompt, as long as the load is even; the rule of Ray Serve's
  prefix-aware router (https://docs.ray.io/en/latest/serve/llm/prefix-aware-request-router.html).
- `predicted_ttft`: least predicted time to first token of the request and of others, from measured steps and known
  queues and caches. Computing a prompt delays the other requests of the replica, so a cached prefix is worth little
  at an idle replica and much at a busy one; otherwise every request would have prefixes computed again for its own
  advantage. Most running requests decode and have their first token, so their delay counts less than that of the
  request itself. If no replica has a tenth of the prompt, about as much is computed everywhere, and the delay of
  others counts little. Of equal replicas the one with fewer requests is chosen; before anything was measured
  `prefix_affinity` decides.
- `round_robin`: one after the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Final, NamedTuple, Protocol

from llm_serving.core.enums import RoutingName

LEAST_MATCH: Final = 0.1
"""Share of a prompt that must be there for it to count; Ray Serve's."""
MOST_UNEVEN: Final = 16
"""Requests that one replica may have more than another while prefixes are looked at. Ray Serve asks for a number and
has none of its own."""
MAX_COMPARED: Final = 8
"""Replicas for which the time is predicted, as that takes longer than to count: of many, the half of these that have
most of the prompt, and otherwise those with the fewest requests."""
OTHERS_WEIGHT: Final = 1 / 3
"""What a delay of one of those who are there counts. As much as one's own, requests stay with a prefix until the queue
before it is seconds longer than others, and the slowest ones are slower; nothing, and prefixes are computed
everywhere, which makes all slower (docs/cluster.md)."""
OTHERS_WEIGHT_OF_NEW: Final = 1 / 10
"""The same weight for a prompt that every replica has to compute."""


class Candidate(NamedTuple):
    """A replica that could get a request, as the event loop sees it at this moment."""

    replica: int
    """Its index."""
    num_unfinished: int
    """Requests that were given to it and have not ended."""
    num_prompt_tokens: int
    """Of the request."""
    num_cached_tokens: int
    """Of these, at the beginning, that it has computed or is about to."""
    num_owed_tokens: int
    """Of prompts of requests that wait there, tokens that are to be computed."""
    num_used_blocks: int
    """Of its cache, held by requests."""
    block_size: int
    """Tokens in a block."""
    token_s: float
    """Seconds that a token adds to a step, as measured; 0 where too little has been."""

    @property
    def work_s(self) -> float:
        """Seconds of its steps that go into what is not computed of the prompt."""
        return (self.num_prompt_tokens - self.num_cached_tokens) * self.token_s


class Candidates:
    """Replicas that could get a request, at least one; each is looked at only when it is asked for.

    Args:
        replicas: Their indices, ascending.
        by_load: (unfinished requests, index), ascending.
        cached: Of those that have any of the prompt, how many of its tokens; the least loaded first.
        look: Tells of one.
        is_there: Whether one counts: others are as if they were not given.
    """

    def __init__(
        self,
        replicas: Sequence[int],
        by_load: Sequence[tuple[int, int]],
        cached: Mapping[int, int],
        look: Callable[[int], Candidate],
        is_there: Callable[[int], bool] = lambda replica: True,
    ) -> None:
        self._replicas, self._by_load, self._cached = replicas, by_load, cached
        self._look, self._is_there = look, is_there

    def __iter__(self) -> Iterator[Candidate]:
        """In ascending order of `replica`."""
        return map(self._look, filter(self._is_there, self._replicas))

    def by_load(self) -> Iterator[Candidate]:
        """The least loaded first."""
        return (self._look(replica) for _, replica in self._by_load if self._is_there(replica))

    def most_loaded(self) -> Candidate:
        return next(self._look(replica) for _, replica in reversed(self._by_load) if self._is_there(replica))

    def by_prefix(self) -> Iterator[Candidate]:
        """Those that have any of the prompt: who has most of it first, of equals the least loaded."""
        ranked = sorted(self._cached, key=self._cached.__getitem__, reverse=True)  # which keeps equals in order
        return map(self._look, filter(self._is_there, ranked))

    def after(self, replica: int) -> Candidate:
        """The next one behind an index, or else the first of all."""
        place = bisect_right(self._replicas, replica)
        ring = chain(self._replicas[place:], self._replicas[:place])
        return next(self._look(each) for each in ring if self._is_there(each))


Predict = Callable[[Candidate], float | None]
"""Seconds until the request would have its first token there; None: too little has been measured of any replica."""


class Routing(Protocol):
    """Asked on the event loop; the answer to a request is the same on every replica, only when it comes is not."""

    needs_prefixes: bool
    """Whether `num_cached_tokens` is looked at. Where it is not, nobody has to name the blocks of every prompt."""

    def choose(self, candidates: Candidates, predict: Predict) -> Candidate:
        """One of them. Changes nothing: who only asks may ask again."""

    def chosen(self, replica: int) -> None:
        """A request has been given to this replica."""


def load_of(candidate: Candidate) -> tuple[int, int]:
    """Smaller is less loaded; of equals the first."""
    return candidate.num_unfinished, candidate.replica


class BlockCost:
    needs_prefixes = True

    def choose(self, candidates: Candidates, predict: Predict) -> Candidate:
        del predict
        return min(candidates, key=lambda each: (_cost(each), each.num_unfinished, each.replica))

    def chosen(self, replica: int) -> None:
        del replica


def _cost(candidate: Candidate) -> float:
    """Blocks of prompts that are to be computed there with this one, and those held while all of them decode."""
    uncached = candidate.num_prompt_tokens - candidate.num_cached_tokens
    num_new = (candidate.num_owed_tokens + uncached) / candidate.block_size
    return 2 * num_new + candidate.num_used_blocks


class LeastLoaded:
    needs_prefixes = False

    def choose(self, candidates: Candidates, predict: Predict) -> Candidate:
        del predict
        return next(candidates.by_load())

    def chosen(self, replica: int) -> None:
        del replica


class PrefixAffinity:
    needs_prefixes = True

    def choose(self, candidates: Candidates, predict: Predict) -> Candidate:
        del predict
        least, most = next(candidates.by_load()), next(candidates.by_prefix(), None)
        is_even = candidates.most_loaded().num_unfinished - least.num_unfinished <= MOST_UNEVEN
        if most is not None and is_even and most.num_cached_tokens >= LEAST_MATCH * most.num_prompt_tokens:
            return most
        return least

    def chosen(self, replica: int) -> None:
        del replica


class PredictedTTFT:
    needs_prefixes = True
    _at_first = PrefixAffinity()

    def choose(self, candidates: Candidates, predict: Predict) -> Candidate:
        having = list(islice(candidates.by_prefix(), MAX_COMPARED // 2))
        predicted = [(predict(each), each) for each in _likely(candidates, having)]
        is_anywhere = bool(having) and having[0].num_cached_tokens >= LEAST_MATCH * having[0].num_prompt_tokens
        others_weight = OTHERS_WEIGHT if is_anywhere else OTHERS_WEIGHT_OF_NEW
        told = [
            (seconds + others_weight * each.num_unfinished * each.work_s, load_of(each), each)
            for seconds, each in predicted
            if seconds is not None
        ]
        return min(told)[2] if told else self._at_first.choose(candidates, predict)

    def chosen(self, replica: int) -> None:
        del replica


def _likely(candidates: Candidates, having: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those `having` most of the prompt among them."""
    by_load = list(islice(candidates.by_load(), MAX_COMPARED + 1))
    if len(by_load) <= MAX_COMPARED:
        return by_load
    replicas = [each.replica for each in having]
    return [*having, *(each for each in by_load if each.replica not in replicas)][:MAX_COMPARED]


class RoundRobin:
    needs_prefixes = False

    def __init__(self) -> None:
        self._last = -1

    def choose(self, candidates: Candidates, predict: Predict) -> Candidate:
        del predict
        return candidates.after(self._last)

    def chosen(self, replica: int) -> None:
        self._last = replica


ROUTINGS: Final[dict[str, Callable[[], Routing]]] = {
    RoutingName.PREDICTED_TTFT: PredictedTTFT,
    RoutingName.PREFIX_AFFINITY: PrefixAffinity,
    RoutingName.BLOCK_COST: BlockCost,
    RoutingName.LEAST_LOADED: LeastLoaded,
    RoutingName.ROUND_ROBIN: RoundRobin,
}

__all__ = ["ROUTINGS", "Candidate", "Candidates", "Predict", "Routing"]
