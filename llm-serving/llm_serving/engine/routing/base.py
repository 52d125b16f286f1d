"""What a rule is: numbers of each replica in, one of them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


Predict = Callable[[Candidate], float | None]
"""Seconds until the request would have its first token there; None: too little has been measured of any replica."""


class Routing(Protocol):
    """Asked on the event loop; the answer to a request is the same on every replica, only when it comes is not."""

    needs_prefixes: bool
    """Whether `num_cached_tokens` is looked at. Where it is not, nobody has to name the blocks of every prompt."""

    def choose(self, candidates: Sequence[Candidate], predict: Predict) -> Candidate:
        """One of them, at least one, in ascending order of `replica`. Changes nothing: who only asks may ask again."""

    def chosen(self, replica: int) -> None:
        """A request has been given to this replica."""


def load_of(candidate: Candidate) -> tuple[int, int]:
    """Smaller is less loaded; of equals the first."""
    return candidate.num_unfinished, candidate.replica
