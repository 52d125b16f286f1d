"""How far to guess: as far as a guess brings more than what else its time would have brought."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from llm_serving.speculation.step_cost import StepCost

MOST_HITS: Final = 0.98
"""Of guesses that were all right of late, so many are expected to be right."""
HIT_PARTS: Final = 64
LEAST_PRICE: Final = 1e-3


class Chance(NamedTuple):
    """That guesses are right, one after another."""

    first: float
    further: float
    """Of each behind the first, if the one before it is right."""


class Worth:
    """Of guesses in steps of so many rows."""

    def __init__(self, cost: StepCost, num_rows: int, num_guessed: int, max_drafts: int) -> None:
        """`num_guessed`: of these rows some guesses may be made for; each guess costs what it does if all that may be
        made are."""
        self._max_drafts = max_drafts
        self._known: dict[tuple[int, int], tuple[int, float]] = {}
        self.num_rows = num_rows
        self.step_s = cost.seconds_of(num_rows)
        num_drafts = num_guessed * max_drafts
        self._draft_s = cost.further(num_rows, num_drafts) / num_drafts

    def reach(self, chance: Chance, proposing_s: float = 0.0) -> int:
        """The last guess of so many brings as much as it costs, `proposing_s` to make it included."""
        first, further = min(chance.first, MOST_HITS), min(max(chance.further, LEAST_PRICE), MOST_HITS)
        price = self.num_rows * (self._draft_s + proposing_s) / self.step_s if self.step_s else 0.0
        if price >= first:
            return 0
        return min(self._max_drafts, 1 + int(math.log(max(price, LEAST_PRICE) / first) / math.log(further)))

    def looked_up(self, chance: Chance) -> tuple[int, float]:
        """How far to guess what costs nothing to make, and the tokens that this brings."""
        key = int(HIT_PARTS * chance.first), int(HIT_PARTS * chance.further)
        if (known := self._known.get(key)) is None:
            chance = Chance(key[0] / HIT_PARTS, key[1] / HIT_PARTS)
            reach = self.reach(chance)
            known = self._known[key] = reach, expected(chance, reach)
        return known


def alike(hits: float) -> Chance:
    """Of guesses that are all right as often."""
    return Chance(hits, hits)


def expected(chance: Chance, reach: int) -> float:
    """Right guesses of so many."""
    first, further = min(chance.first, MOST_HITS), min(chance.further, MOST_HITS)
    return first * (1 - further**reach) / (1 - further)
