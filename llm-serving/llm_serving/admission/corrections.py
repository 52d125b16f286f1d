"""What predictions have lacked lately, learned from what became of them."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Final, Generic, TypeVar

MEMORY: Final = 256
"""Predictions after which one counts 1/e."""
MOST: Final = math.log(4)
"""No correction is by more than a factor of 4: beyond, something else is wrong than the prediction."""

Kind = TypeVar("Kind", bound=Hashable)


class Corrections(Generic[Kind]):
    """A factor for each kind of prediction: the geometric mean of what came, over what was predicted uncorrected."""

    def __init__(self) -> None:
        self._logs: dict[Kind, tuple[float, float]] = {}
        """By kind: weighted sum of logarithms, and of weights; the first ones count as much as one that says 1."""

    def factor(self, kind: Kind) -> float:
        total, weight = self._logs.get(kind, (0.0, 0.0))
        return math.exp(total / (weight + 1.0))

    def learn(self, kind: Kind, predicted_s: float, real_s: float) -> None:
        """What came of an uncorrected prediction; either that is not above 0 teaches nothing."""
        if predicted_s <= 0 or real_s <= 0:
            return
        total, weight = self._logs.get(kind, (0.0, 0.0))
        keep = 1 - 1 / MEMORY
        log = min(MOST, max(-MOST, math.log(real_s / predicted_s)))
        self._logs[kind] = (total * keep + log, weight * keep + 1.0)
