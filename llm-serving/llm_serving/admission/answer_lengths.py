"""How long answers get: as those to prompts that begin alike have got lately, and otherwise as all have."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams

MEMORY: Final = 256
"""Ended requests that are remembered, of each size."""
MIN_ENDS: Final = 8
"""Ended requests that must have been seen before anything is told."""
MEMORY_ALIKE: Final = 32
"""Ended requests that are remembered, of each beginning."""
MIN_ALIKE: Final = 2
"""Those that must have ended before they say more than all others."""
MAX_BEGINNINGS: Final = 4096
"""Remembered; those that were met longest ago are forgotten."""
LONGEST_BEGINNING: Final = 1024
"""Tokens of a prompt that are looked at."""


class Asked(NamedTuple):
    """What the length of an answer is told by."""

    sampling: SamplingParams = SamplingParams()
    beginnings: tuple[int, ...] = ()
    """Of its prompt, as `beginnings_of` has them."""


def beginnings_of(prompt_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Names for the beginnings of a prompt, the longest first: the whole, and those of 1, 2, 4, 8 and so on tokens.

    Requests have instructions and templates before what differs, so the kind of a request shows in how it begins.
    """
    num_tokens = min(len(prompt_token_ids), LONGEST_BEGINNING)
    lengths = [2**power for power in range(num_tokens.bit_length()) if 2**power < num_tokens]
    return tuple([hash(tuple(prompt_token_ids[:length])) for length in (num_tokens, *reversed(lengths))])


class _Shares:
    """The newest answers of a kind, as shares of the most they might have had."""

    def __init__(self, memory: int) -> None:
        self._newest: deque[float] = deque()
        self._memory = memory
        self.ascending: list[float] = []
        """Never changed in place."""

    def add(self, share: float) -> None:
        ascending = self.ascending[:]
        if len(self._newest) == self._memory:
            ascending.remove(self._newest.popleft())
        self._newest.append(share)
        insort(ascending, share)
        self.ascending = ascending


class Remaining(NamedTuple):
    """Tokens that a request may still get."""

    num_output: int
    """That it has."""
    most: int
    """It may have."""
    shares: Sequence[float] | None = None
    """Ascending, of the most: what requests like it came to. None: it will have the most."""
    first: int = 0
    """Of these that is more than it has."""

    def at(self, quantile: float) -> int:
        """So that this share of requests like it gets fewer."""
        if self.shares is None:
            return self.most - self.num_output
        num_longer = len(self.shares) - self.first
        if num_longer == 0:
            return max(1, round(quantile * (self.most - self.num_output)))
        return max(1, round(self.shares[self.first + int(quantile * num_longer)] * self.most) - self.num_output)


class AnswerLengths:
    """Lengths of answers as shares of the most they might have had; one thread writes, any may read."""

    def __init__(self) -> None:
        self._of_size: dict[int, _Shares] = {}
        """By binary digits of the most tokens, 0: of all."""
        self._alike: dict[tuple[int, int], _Shares] = {}
        """By these digits and a beginning, in the order in which they were met last."""

    def ended(self, num_output: int, asked: Asked) -> None:
        """A request has ended after so many tokens."""
        sampling = asked.sampling
        if is_certain(sampling):
            return
        share, size = min(1.0, num_output / sampling.max_tokens), sampling.max_tokens.bit_length()
        for each in (0, size):
            self._of_size.setdefault(each, _Shares(MEMORY)).add(share)
        for beginning in asked.beginnings:
            shares = self._alike.pop((size, beginning), None) or _Shares(MEMORY_ALIKE)
            shares.add(share)
            self._alike[size, beginning] = shares
        while len(self._alike) > MAX_BEGINNINGS:
            del self._alike[next(iter(self._alike))]

    def remaining(self, num_output: int, asked: Asked) -> Remaining | None:
        """What a request that has so many tokens may still get; None where too little has been seen."""
        most = asked.sampling.max_tokens
        if is_certain(asked.sampling):
            return Remaining(num_output, most)
        has = num_output / most
        shares = self._like(asked, has)
        if len(shares) < MIN_ALIKE:
            return None
        return Remaining(num_output, most, shares, bisect_right(shares, has) if num_output else 0)

    def _like(self, asked: Asked, share: float) -> Sequence[float]:
        """Ascending shares of the requests most like this one of which some got further than it has; maybe none."""
        size = asked.sampling.max_tokens.bit_length()
        for beginning in asked.beginnings:
            alike = self._alike.get((size, beginning))
            if alike is not None and len(alike.ascending) >= MIN_ALIKE and alike.ascending[-1] > share:
                return alike.ascending
        for each in (size, 0):
            found = self._of_size.get(each)
            if found is not None and len(found.ascending) >= MIN_ENDS:
                return found.ascending
        return ()


def is_certain(sampling: SamplingParams) -> bool:
    """Whether an answer ends by its length alone."""
    endless = sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids
    return endless or sampling.max_tokens == 0


def asked_of(request: Request) -> Asked:
    return Asked(request.sampling, request.beginnings)
