"""How long answers get: as those to prompts that begin alike have got lately, and otherwise as all have.

The longer a beginning that prompts share, the more it says, and the fewer have been seen that have it: of n that have
ended one in n + 1 is taken to be as those with a shorter one. The same prompt, answered greedily, gets the same answer.

Of answers that began together the short ones end first. So those that run count too, as longer than they are by now:
what is told is the estimate of Kaplan and Meier.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams

MEMORY: Final = 256
"""Ended requests that are remembered, of each size."""
MIN_ENDS: Final = 8
"""Ended requests that must have been seen before anything is told."""
MEMORY_ALIKE: Final = 32
"""Ended requests that are remembered, of each beginning."""
LEAST_WEIGHT: Final = 0.02
"""Of what less alike ones say; below, they are not asked."""
MAX_BEGINNINGS: Final = 4096
"""Remembered; those that were met longest ago are forgotten."""
LONGEST_BEGINNING: Final = 1024
"""Tokens of a prompt that are looked at."""


_Name = int | tuple[int, int]
"""Of a kind of answers: binary digits of the most tokens, 0 for all; with them a beginning."""


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


class Expected(NamedTuple):
    """Lengths that an answer may come to, as shares of the most."""

    shares: Sequence[float]
    """Ascending."""
    weights: Sequence[float]
    """Of each and all before it together."""

    def middle(self, share: float) -> float:
        """Of those beyond a share; where there are none, of what is left of the most."""
        first = bisect_right(self.shares, share)
        if first == len(self.shares):
            return _longer_than(share)
        before = self.weights[first - 1] if first else 0.0
        return self.shares[bisect_right(self.weights, (before + self.weights[-1]) / 2, first, len(self.shares) - 1)]


class _Shares:
    """The newest answers of a kind, as shares of the most they might have had."""

    def __init__(self, memory: int) -> None:
        self._newest: deque[tuple[float, int]] = deque()
        self._memory = memory
        self._ascending: list[tuple[float, int]] = []
        """Never changed in place; with each share the number of its request."""
        self._since = -1
        """Of the requests that came after this one, each that has ended is remembered."""

    def __len__(self) -> int:
        return len(self._ascending)

    def add(self, share: float, sequence: int) -> None:
        ascending = self._ascending[:]
        if len(self._newest) == self._memory:
            forgotten = self._newest.popleft()
            ascending.remove(forgotten)
            self._since = max(self._since, forgotten[1])
        self._newest.append((share, sequence))
        insort(ascending, (share, sequence))
        self._ascending = ascending

    def expected(
        self, running: Sequence[tuple[float, int]], num_least: int, others: Expected | None = None
    ) -> Expected | None:
        """What is expected of requests like these; None where fewer than `num_least` have ended.

        With those that run only those count that came after all that are forgotten, so that long and short ones are
        among them as they came.

        Args:
            running: The shares that requests of the kind have got to, with their numbers.
            num_least: That must have ended.
            others: Of a wider kind, for those that got further than all of this one.
        """
        ended, since = self._ascending, self._since
        if len(ended) < num_least:
            return None
        going = [(share, True) for share, sequence in running if sequence > since]
        kept = [(share, False) for share, sequence in ended if sequence > since] if going else []
        if not kept:
            return Expected([share for share, _ in ended], range(1, len(ended) + 1))
        return _estimated(sorted(kept + going), others)


def _estimated(answers: Sequence[tuple[float, bool]], others: Expected | None) -> Expected:
    """Kaplan and Meier: what one that runs weighs goes to those that got further, in equal parts.

    Where none did, it will as others do; where nothing is known of others either, as `_longer_than` says.

    Args:
        answers: Ascending shares, and whether they run on.
        others: Of a wider kind.
    """
    shares: list[float] = []
    weights: list[float] = []
    weight = 1.0
    for num_left, (share, runs) in zip(range(len(answers) - 1, -1, -1), answers, strict=True):
        if runs and num_left:
            weight += weight / num_left
            continue
        if runs:
            share = _longer_than(share) if others is None else others.middle(share)
        shares.append(share)
        weights.append(weight)
    return Expected(shares, list(accumulate(weights)))


def _longer_than(share: float) -> float:
    """What an answer comes to of which nothing is known but that it is longer: the mean where its length is as likely
    within any factor of two as within any other (log-uniform, the prior that knows no scale: Jeffreys, "Theory of
    Probability", 1961, section 3.1)."""
    return (1 - share) / math.log(1 / share) if 0 < share < 1 else (share + 1) / 2


class _Part(NamedTuple):
    """What some of the requests like one come to, of those that got further than it has."""

    weight: float
    """Of these among all of them."""
    expected: Expected
    first: int
    """Of its shares that is more than the request has."""
    before: float
    """Weight of those before."""

    def share(self, quantile: float) -> float:
        shares, weights = self.expected
        weight = self.before + quantile * (weights[-1] - self.before)
        return shares[bisect_right(weights, weight, self.first, len(shares) - 1)]


class Remaining(NamedTuple):
    """Tokens that a request may still get."""

    num_output: int
    """That it has."""
    most: int
    """It may have."""
    parts: Sequence[_Part] | None = None
    """The most alike first; empty: none got so far. None: it will have the most."""
    weight: float = 0.0
    """Of all of them."""

    def at(self, quantile: float) -> int:
        """One of what requests like it get; of evenly spread quantiles as many get each as do."""
        if self.parts is None:
            return self.most - self.num_output
        if not self.parts:
            return max(1, round(quantile * (self.most - self.num_output)))
        rest = quantile * self.weight
        for part in self.parts:
            if rest < part.weight:
                break
            rest -= part.weight
        share = part.share(min(1.0, rest / part.weight))
        return max(1, round(share * self.most) - self.num_output)


class AnswerLengths:
    """Lengths of answers as shares of the most they might have had; one thread writes, any may read."""

    def __init__(self) -> None:
        self._of_size: dict[int, _Shares] = {}
        """By binary digits of the most tokens, 0: of all."""
        self._alike: dict[tuple[int, int], _Shares] = {}
        """By these digits and a beginning, in the order in which they were met last."""

    def ended(self, num_output: int, asked: Asked, sequence: int = 0) -> None:
        """A request has ended after so many tokens; those with higher numbers came later."""
        sampling = asked.sampling
        if is_certain(sampling):
            return
        share, size = min(1.0, num_output / sampling.max_tokens), sampling.max_tokens.bit_length()
        for each in (0, size):
            self._of_size.setdefault(each, _Shares(MEMORY)).add(share, sequence)
        for beginning in asked.beginnings:
            shares = self._alike.pop((size, beginning), None) or _Shares(MEMORY_ALIKE)
            shares.add(share, sequence)
            self._alike[size, beginning] = shares
        while len(self._alike) > MAX_BEGINNINGS:
            del self._alike[next(iter(self._alike))]

    def beside(self, running: Sequence[Request]) -> LengthsNow:
        """What is told while these run."""
        return LengthsNow(self._of_size, self._alike, running)


class LengthsNow:
    """Lengths as they are told at one moment.

    Args:
        of_size: As `AnswerLengths` has them.
        alike: As well.
        running: The requests that are under way.
    """

    def __init__(
        self, of_size: dict[int, _Shares], alike: dict[tuple[int, int], _Shares], running: Sequence[Request]
    ) -> None:
        self._of_size = of_size
        self._alike = alike
        self._running: dict[_Name, list[tuple[float, int]]] = {}
        self._known: dict[_Name, Expected | None] = {}
        for request in running:
            if is_certain(request.sampling) or request.is_finished:
                continue
            most = request.sampling.max_tokens
            reached = (min(1.0, len(request.output_token_ids) / most), request.sequence)
            size = most.bit_length()
            kinds: list[_Name] = [0, size, *[(size, beginning) for beginning in request.beginnings]]
            for kind in kinds:
                self._running.setdefault(kind, []).append(reached)

    def remaining(self, num_output: int, asked: Asked) -> Remaining | None:
        """What a request that has so many tokens may still get; None where too little has been seen."""
        most = asked.sampling.max_tokens
        if is_certain(asked.sampling):
            return Remaining(num_output, most)
        like = self._like(asked)
        if not like:
            return None
        parts, total, has = [], 0.0, num_output / most
        for weight, expected in like:
            if (part := _beyond(expected, weight, has)) is not None:
                parts.append(part)
                total += part.weight
        return Remaining(num_output, most, parts, total)

    def _like(self, asked: Asked) -> list[tuple[float, Expected]]:
        """What is expected of requests like this one, the most alike first, and how much that says."""
        sampling = asked.sampling
        size = sampling.max_tokens.bit_length()
        others = self._expected(size, self._of_size.get(size), MIN_ENDS)
        others = others or self._expected(0, self._of_size.get(0), MIN_ENDS)
        if others is None:
            return []
        like, rest = [], 1.0
        for number, beginning in enumerate(asked.beginnings):
            shares = self._alike.get((size, beginning))
            alike = self._expected((size, beginning), shares, 1, others)
            if shares is None or alike is None:
                continue
            is_same = number == 0 and sampling.temperature == 0
            after = 0.0 if is_same else rest / (len(shares) + 1)
            like.append((rest - after, alike))
            rest = after
            if rest < LEAST_WEIGHT:
                break
        # Also after the same: one that is not, although it begins so, goes on as others do.
        return [*like, (max(rest, LEAST_WEIGHT), others)]

    def _expected(
        self, kind: _Name, shares: _Shares | None, num_least: int, others: Expected | None = None
    ) -> Expected | None:
        if shares is None:
            return None
        if kind not in self._known:
            self._known[kind] = shares.expected(self._running.get(kind, ()), num_least, others)
        return self._known[kind]


def _beyond(expected: Expected, weight: float, has: float) -> _Part | None:
    """Those that got further than a request has; None where none did."""
    shares, weights = expected
    if not has or has < shares[0]:
        return _Part(weight, expected, 0, 0.0)
    first = bisect_right(shares, has)
    if first == len(shares):
        return None
    before = weights[first - 1]
    return _Part(weight * (1 - before / weights[-1]), expected, first, before)


def is_certain(sampling: SamplingParams) -> bool:
    """Whether an answer ends by its length alone."""
    endless = sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids
    return endless or sampling.max_tokens == 0


def asked_of(request: Request) -> Asked:
    return Asked(request.sampling, request.beginnings)
