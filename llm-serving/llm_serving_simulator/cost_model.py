"""Seconds of a step as a sum of linear pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from llm_serving_simulator.step_shape import StepShape

CONSTANT: Final = "step"
"""What a piece is over that counts once a step."""
QUANTITIES: Final = (CONSTANT, *StepShape._fields)


_Plan = tuple[tuple[int, float, float, float], ...]
"""(index in `StepShape`, above, to, seconds) of each piece."""
_NUM_OF_ROWS: Final = StepShape._fields.index("samples") + 1


@dataclass(frozen=True, slots=True)
class Piece:
    """`seconds` for each unit of `of` above `above`, up to `to`."""

    of: str
    seconds: float
    above: float = 0.0
    to: float | None = None
    """None: without end."""

    def __str__(self) -> str:
        if self.of == CONSTANT:
            return f"{1e6 * self.seconds:.4g} us a step"
        span = f" {self.above:g} to {self.to:g}" if self.to is not None else f" above {self.above:g}"
        return f"{1e6 * self.seconds:.4g} us for each of {self.of}{span if self.above or self.to is not None else ''}"


@dataclass(frozen=True)
class CostModel:
    """A sum of pieces; nothing where there are none."""

    pieces: tuple[Piece, ...] = ()
    _plan: _Plan = field(init=False, repr=False, compare=False, default=())
    """Of the pieces over what differs from step to step."""
    _plan_of_rows: _Plan = field(init=False, repr=False, compare=False, default=())
    """Of the others but for the constant: few values of these follow each other in a row."""
    _constant: float = field(init=False, repr=False, compare=False, default=0.0)
    _known: dict[tuple[float, ...], float] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Seconds of constant and rows by `StepShape.rows`, `tokens` and `samples`."""

    def __post_init__(self) -> None:
        plan = [
            (StepShape._fields.index(each.of), each.above, float("inf") if each.to is None else each.to, each.seconds)
            for each in self.pieces
            if each.of != CONSTANT
        ]
        object.__setattr__(self, "_plan", tuple(each for each in plan if each[0] >= _NUM_OF_ROWS))
        object.__setattr__(self, "_plan_of_rows", tuple(each for each in plan if each[0] < _NUM_OF_ROWS))
        object.__setattr__(self, "_constant", sum(each.seconds for each in self.pieces if each.of == CONSTANT))

    def seconds(self, shape: StepShape) -> float:
        """Of a step of this shape."""
        key = shape[:_NUM_OF_ROWS]
        total = self._known.get(key)
        if total is None:
            total = self._known[key] = _sum(self._plan_of_rows, shape, self._constant)
        return _sum(self._plan, shape, total) if self._plan else total


def _sum(plan: _Plan, shape: StepShape, total: float) -> float:
    for index, above, to, seconds in plan:
        amount = shape[index]
        if amount > above:
            total += seconds * ((amount if amount < to else to) - above)
    return total


def segments(of: str, ends: Sequence[float]) -> list[Piece]:
    """Pieces of one second a unit, one behind the other with these ends, the last without end."""
    starts = [0.0, *ends]
    return [Piece(of, 1.0, start, end) for start, end in zip(starts, [*ends, None], strict=True)]
