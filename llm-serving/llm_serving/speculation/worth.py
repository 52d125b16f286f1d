"""How far to guess: as far as a guess brings more than what else its time would have brought."""

from __future__ import annotations

import math
from typing import Final

from llm_serving.speculation.step_cost import StepCost

MOST_HITS: Final = 0.98
"""Of guesses that were all right of late, so many are expected to be right."""
HIT_PARTS: Final = 64
LEAST_PRICE: Final = 1e-3


class Worth:
    """Of guesses in steps of so many rows."""

    def __init__(self, cost: StepCost, num_rows: int, num_guessed: int, max_drafts: int) -> None:
        """`num_guessed`: of these rows some guesses may be made for; each guess costs what it does if all that may be
        made are."""
        self._max_drafts = max_drafts
        self._known: dict[int, tuple[int, float]] = {}
        self.num_rows = num_rows
        self.step_s = cost.seconds_of(num_rows)
        num_drafts = num_guessed * max_drafts
        self._draft_s = cost.further(num_rows, num_drafts) / num_drafts

    def reach(self, hits: float, proposing_s: float = 0.0) -> int:
        """The last guess of so many brings as much as it costs, `proposing_s` to make it included."""
        hits = min(hits, MOST_HITS)
        price = self.num_rows * (self._draft_s + proposing_s) / self.step_s if self.step_s else 0.0
        if price >= hits:
            return 0
        return min(self._max_drafts, int(math.log(max(price, LEAST_PRICE)) / math.log(hits)))

    def looked_up(self, hits: float) -> tuple[int, float]:
        """How far to guess what costs nothing to make, and the tokens that this brings."""
        key = int(HIT_PARTS * hits)
        if (known := self._known.get(key)) is None:
            hits = key / HIT_PARTS
            reach = self.reach(hits)
            known = self._known[key] = reach, expected(hits, reach)
        return known


def expected(hits: float, reach: int) -> float:
    """Right guesses of so many, each of which is right with the probability `hits` if the one before it is."""
    hits = min(hits, MOST_HITS)
    return hits * (1 - hits**reach) / (1 - hits)
