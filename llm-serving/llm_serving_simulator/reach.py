"""How large the steps were that a profile is made of: what takes how long beyond them, nobody has measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from llm_serving_simulator.step_shape import StepShape

QUANTITIES: Final = ("rows", "tokens", "context", "pairs")
"""Of a step, that are watched."""
TOLERANCE: Final = 1.1
"""Times the largest that was measured, up to which a step counts as measured."""
BEYOND: Final = "BEYOND WHAT WAS MEASURED"
"""What is told of such steps begins so."""
FEW: Final = 3
"""Steps that must have been so large."""
_INDICES: Final = tuple(StepShape._fields.index(each) for each in QUANTITIES)


@dataclass(frozen=True)
class Reach:
    """By quantity, the largest that was measured; one that is missing is not watched."""

    most: Mapping[str, float]

    def allows(self, quantity: str, amount: float) -> bool:
        """Whether steps of so much were measured."""
        return quantity not in self.most or amount <= TOLERANCE * self.most[quantity]


def reach_of(shapes: Sequence[StepShape]) -> dict[str, float]:
    """What some of these steps have reached."""
    place = min(FEW, len(shapes))
    return {
        name: float(sorted(shape[index] for shape in shapes)[-place])
        for name, index in zip(QUANTITIES, _INDICES, strict=True)
        if place
    }


def told_beyond(notices: Iterable[str]) -> str:
    """Of notices those that tell of steps larger than any that was measured."""
    return "; ".join(each for each in notices if each.startswith(BEYOND))


class Beyond:
    """Looks at the steps of a simulation.

    Args:
        reach: Of its profile.
    """

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self.num_steps = 0
        """Larger than what was measured."""
        self._limits = [
            (index, name, TOLERANCE * reach.most[name])
            for name, index in zip(QUANTITIES, _INDICES, strict=True)
            if name in reach.most
        ]
        self._largest: dict[str, float] = {}

    def look(self, shape: StepShape) -> None:
        """A step has this shape."""
        is_beyond = False
        for index, name, limit in self._limits:
            if shape[index] > limit:
                is_beyond = True
                self._largest[name] = max(shape[index], self._largest.get(name, 0))
        self.num_steps += is_beyond

    def told(self, num_steps: int) -> Iterator[str]:
        """What people are told, of so many steps in all; nothing where every step was like some that was measured."""
        if self.num_steps:
            names = ", ".join(
                f"{name} up to {largest:,.0f} (measured: {self._reach.most[name]:,.0f})"
                for name, largest in self._largest.items()
            )
            share = self.num_steps / max(1, num_steps)
            yield f"{BEYOND}: {share:.1%} of its steps have {names}; their times are drawn on"
