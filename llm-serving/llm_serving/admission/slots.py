"""When slots get free: what running requests may still have, and how much of that such requests have taken lately."""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from typing import Final

from llm_serving.core.request import Request
from llm_serving.core.sampling_params import SamplingParams

MEMORY: Final = 256
"""Ended requests that are remembered, of each size."""
MIN_ENDS: Final = 8
"""Ended requests that must have been seen before anything is told."""
GOLDEN: Final = 0.6180339887498949
ROUNDS: Final = 3
"""Guesses at what becomes of all slots; the one in the middle counts."""


class AnswerLengths:
    """Lengths of answers as shares of the most they might have had; one thread writes, any may read."""

    def __init__(self) -> None:
        self._newest: dict[int, deque[float]] = {}
        self._ascending: dict[int, list[float]] = {}
        """By binary digits of the most tokens, 0: of all; never changed in place."""

    def ended(self, num_output: int, sampling: SamplingParams) -> None:
        """A request has ended after so many tokens."""
        if is_certain(sampling):
            return
        share = min(1.0, num_output / sampling.max_tokens)
        for size in (0, sampling.max_tokens.bit_length()):
            newest = self._newest.setdefault(size, deque())
            shares = self._ascending.get(size, [])[:]
            if len(newest) == MEMORY:
                shares.remove(newest.popleft())
            newest.append(share)
            insort(shares, share)
            self._ascending[size] = shares

    def remaining(self, num_output: int, sampling: SamplingParams, quantile: float) -> int | None:
        """Tokens that a request which has so many may still get: so that this share of requests like it gets fewer.

        None where too little has been seen.
        """
        most = sampling.max_tokens
        if is_certain(sampling):
            return most - num_output
        shares = self._ascending.get(most.bit_length(), [])
        if len(shares) < MIN_ENDS:
            shares = self._ascending.get(0, [])
        if len(shares) < MIN_ENDS:
            return None
        first = bisect_right(shares, num_output / most) if num_output else 0
        if first == len(shares):
            return max(1, round(quantile * (most - num_output)))
        share = shares[first + int(quantile * (len(shares) - first))]
        return max(1, round(share * most) - num_output)


def is_certain(sampling: SamplingParams) -> bool:
    """Whether an answer ends by its length alone."""
    return sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids


class Slots:
    """The running requests of a replica after one step; ask while it is the newest.

    Args:
        running: Those that have slots.
        lengths: Of answers.
    """

    def __init__(self, running: Sequence[Request], lengths: AnswerLengths) -> None:
        self._running = running
        self._lengths = lengths
        self._known: dict[tuple[int, int, int | None], int | None] = {}

    def steps_until_free(self, ahead: Sequence[SamplingParams], num_slots: int, max_rank: int | None) -> int | None:
        """Steps until a slot is free for whoever is behind those who wait, none of whom gets a token meanwhile.

        Requests of classes beyond `max_rank` give way. None where too little has been seen.
        """
        key = (len(ahead), num_slots, max_rank)
        if key not in self._known:
            guesses = [self._guess(ahead, num_slots, max_rank, number) for number in range(ROUNDS)]
            told = sorted(guess for guess in guesses if guess is not None)
            self._known[key] = told[len(told) // 2] if len(told) == ROUNDS else None
        return self._known[key]

    def _guess(self, ahead: Sequence[SamplingParams], num_slots: int, max_rank: int | None, number: int) -> int | None:
        remaining, quantile = self._lengths.remaining, number / ROUNDS
        free: list[int] = []
        for request in self._running:
            if max_rank is None or request.request_class.rank <= max_rank:
                quantile = (quantile + GOLDEN) % 1.0
                left = remaining(len(request.output_token_ids), request.sampling, quantile)
                if left is None:
                    return None
                free.append(0 if request.is_finished else left)
        free.sort()
        free = [0] * (num_slots - len(free)) + free
        for sampling in ahead:
            quantile = (quantile + GOLDEN) % 1.0
            left = remaining(0, sampling, quantile)
            if left is None:
                return None
            # One more step: the one after an end takes the next.
            heapq.heapreplace(free, free[0] + left + 1)
        return free[0]
