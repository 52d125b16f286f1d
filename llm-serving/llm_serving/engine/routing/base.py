"""What a rule is: numbers of each replica in, one of them out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple, Protocol


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
