"""What predictions have lacked lately, learned from what became of them."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

MEMORY: Final = 256
"""Predictions after which one counts 1/e."""
DOUBT: Final = 32.0
"""Right predictions that there are to begin with; they are forgotten like others."""
MOST: Final = math.log(4)
"""No correction is by more than a factor of 4: beyond, something else is wrong than the prediction."""

_AT_FIRST: Final = (0.0, DOUBT)

Kind = TypeVar("Kind", bound=Hashable)


class Corrections(Generic[Kind]):
    """A factor for each kind of prediction: the geometric mean of what came, over what was predicted uncorrected.

    Those who wait at the same time wait for the same: their predictions err together, and many of them are little
    evidence. So the first ones count as much as `DOUBT` that were right.
    """

    def __init__(self) -> None:
        self._logs: dict[Kind, tuple[float, float]] = {}
        """By kind: weighted sum of logarithms, and of weights."""

    def factor(self, kind: Kind) -> float:
        total, weight = self._logs.get(kind, _AT_FIRST)
        return math.exp(total / weight)

    def learn(self, kind: Kind, predicted_s: float, real_s: float) -> None:
        """What came of an uncorrected prediction; either that is not above 0 teaches nothing."""
        if predicted_s <= 0 or real_s <= 0:
            return
        total, weight = self._logs.get(kind, _AT_FIRST)
        keep = 1 - 1 / MEMORY
        log = min(MOST, max(-MOST, math.log(real_s / predicted_s)))
        self._logs[kind] = (total * keep + log, weight * keep + 1.0)
