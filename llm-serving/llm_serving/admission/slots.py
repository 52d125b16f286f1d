"""When slots get free: what running requests may still have, and what those ahead will take."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cached_property
from typing import Final

from llm_serving.admission.answer_lengths import AnswerLengths, Asked, LengthsNow, Remaining, asked_of
from llm_serving.core.request import Request

GOLDEN: Final = 0.6180339887498949
MIN_ROUNDS: Final = 3
MAX_ROUNDS: Final = 15
"""Guesses at what becomes of all slots; the one in the middle counts."""
MAX_LENGTHS: Final = 600
"""That are guessed for one question, beyond the least number of rounds: of many requests each one matters less."""


class Slots:
    """The running requests of a replica after one step; ask while it is the newest.

    Args:
        running: Those that have slots.
        lengths: Of answers.
    """

    def __init__(self, running: Sequence[Request], lengths: AnswerLengths) -> None:
        self._requests = running
        self._lengths = lengths
        self._known: dict[tuple[int, int, int | None, str | None], int | None] = {}

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def _running(self) -> Sequence[Request]:
        """With what they have got until now."""
        return self._requests

    @cached_property
    def request_ids(self) -> frozenset[str]:
        """Of those who have a slot, or for whose answers something has one."""
        return frozenset([each.asked.request_id for each in self._requests])

    def with_others(self, others: Sequence[Slots]) -> Slots:
        """Those of other replicas beside these, as if all were one."""
        if not others:
            return self
        return Slots([request for each in (self, *others) for request in each._running], self._lengths)

    @cached_property
    def _now(self) -> LengthsNow:
        return self._lengths.beside(self._running)

    def steps_until_free(
        self, ahead: Sequence[Asked], num_slots: int, max_rank: int | None, tenant: str | None = None
    ) -> int | None:
        """Steps until a slot is free for whoever is behind those who wait, none of whom gets a token meanwhile.

        Requests of classes beyond `max_rank` give way; with `tenant` the slots are those that it may have. None where
        too little has been seen.
        """
        key = (len(ahead), num_slots, max_rank, tenant)
        if key not in self._known:
            running = [
                each
                for each in self._running
                if (max_rank is None or each.request_class.rank <= max_rank) and tenant in (None, each.tenant)
            ]
            self._known[key] = self._median(running, ahead, num_slots)
        return self._known[key]

    def _median(self, running: Sequence[Request], ahead: Sequence[Asked], num_slots: int) -> int | None:
        """Of several guesses; what is known of each request is looked up once for all of them."""
        remaining = self._now.remaining
        of_running = [remaining(len(each.output_token_ids), asked_of(each)) for each in running]
        of_ahead = [remaining(0, each) for each in ahead]
        placed = [each for each in of_running if each is not None]
        waiting = [each for each in of_ahead if each is not None]
        if len(placed) < len(of_running) or len(waiting) < len(of_ahead):
            return None
        ended = [each.is_finished for each in running]
        num_rounds = min(MAX_ROUNDS, max(MIN_ROUNDS, MAX_LENGTHS // max(1, len(placed) + len(waiting))))
        guesses = sorted(_guess(placed, ended, waiting, num_slots, each / num_rounds) for each in range(num_rounds))
        return guesses[num_rounds // 2]


def _guess(
    running: Sequence[Remaining], ended: Sequence[bool], ahead: Sequence[Remaining], num_slots: int, quantile: float
) -> int:
    """Begins with this quantile of the lengths of the first; each further one has another."""
    free: list[int] = []
    for request, has_ended in zip(running, ended, strict=True):
        quantile = (quantile + GOLDEN) % 1.0
        free.append(0 if has_ended else request.at(quantile))
    free.sort()
    # Where more run than there are slots, as there were more, the first ends leave none.
    free = [0] * (num_slots - len(free)) + free[max(0, len(free) - num_slots) :]
    for asked in ahead:
        quantile = (quantile + GOLDEN) % 1.0
        # One more step: the one after an end takes the next.
        heapq.heapreplace(free, free[0] + asked.at(quantile) + 1)
    return free[0]
