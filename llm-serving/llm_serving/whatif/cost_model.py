"""Seconds of a step as a sum of linear pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from llm_serving.whatif.step_shape import StepShape

CONSTANT: Final = "step"
"""What a piece is over that counts once a step."""
QUANTITIES: Final = (CONSTANT, *StepShape._fields)


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
    _plan: tuple[tuple[int, float, float, float], ...] = field(init=False, repr=False, compare=False, default=())
    _constant: float = field(init=False, repr=False, compare=False, default=0.0)

    def __post_init__(self) -> None:
        plan = tuple(
            (StepShape._fields.index(each.of), each.above, float("inf") if each.to is None else each.to, each.seconds)
            for each in self.pieces
            if each.of != CONSTANT
        )
        object.__setattr__(self, "_plan", plan)
        object.__setattr__(self, "_constant", sum(each.seconds for each in self.pieces if each.of == CONSTANT))

    def seconds(self, shape: StepShape) -> float:
        """Of a step of this shape."""
        total = self._constant
        for index, above, to, seconds in self._plan:
            amount = shape[index]
            if amount > above:
                total += seconds * ((amount if amount < to else to) - above)
        return total


def segments(of: str, ends: Sequence[float]) -> list[Piece]:
    """Pieces of one second a unit, one behind the other with these ends, the last without end."""
    starts = [0.0, *ends]
    return [Piece(of, 1.0, start, end) for start, end in zip(starts, [*ends, None], strict=True)]
