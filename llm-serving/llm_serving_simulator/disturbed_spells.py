"""When something else had the machine: spells of a measurement in which steps of all kinds took longer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from llm_serving_simulator.measured_steps import MeasuredStep
from llm_serving_simulator.step_fit import fit_steps

SPELL_S: Final = 0.5
FACTOR: Final = 1.2
"""Times what steps of these shapes take in the median spell, from which on one counts as disturbed."""
MIN_STEPS: Final = 4
"""Of a spell, to tell."""
ROUNDS: Final = 5


@dataclass(frozen=True)
class Spells:
    """By what factor steps took longer, at which time; where nothing else had the machine, 1."""

    factors: Mapping[int, float] = field(default_factory=dict)
    """By number of the spell, of those that were disturbed."""
    num: int = 1
    """Of all spells."""

    def factor(self, time: float) -> float:
        return self.factors.get(int(time // SPELL_S), 1.0)

    @property
    def mean(self) -> float:
        """Over all spells: what one that is no different from these has to expect."""
        return 1 + sum(each - 1 for each in self.factors.values()) / self.num


def disturbed_spells(steps: Sequence[MeasuredStep]) -> Spells:
    """Compares each step with what is fitted to those of all spells, each as if nothing had disturbed it.

    A load asks for one kind of steps after the other, so that a slow second would make one kind slow for good.
    """
    numbers = [int(each.replied_s // SPELL_S) for each in steps]
    measured = np.array([each.seconds for each in steps])
    spells = Spells(num=len(set(numbers)))
    for _ in range(ROUNDS):
        factors = np.array([spells.factor(each.replied_s) for each in steps])
        found = fit_steps(steps, (measured / factors).tolist(), held_out=False)
        ratios: dict[int, list[float]] = defaultdict(list)
        for number, each, seconds in zip(numbers, steps, measured.tolist(), strict=True):
            ratios[number].append(seconds / max(found.seconds(each.shape, not each.ahead), 1e-9))
        medians = {number: float(np.median(some)) for number, some in ratios.items() if len(some) >= MIN_STEPS}
        middle = float(np.median(list(medians.values()))) if medians else 1.0
        slow = {number: median / middle for number, median in medians.items() if median > FACTOR * middle}
        spells = Spells(slow, len(ratios))
    return spells
