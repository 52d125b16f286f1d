"""The cost model: the seconds of a step as a sum of linear terms over the step's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np


class StepShape(NamedTuple):
    """The quantities of one step that its duration depends on."""

    rows: int
    """Requests in the step."""
    tokens: int
    """New tokens of all rows."""
    samples: int
    """Sampled tokens."""
    context: int
    """Keys that attention reads: the context length of all rows, new tokens included."""
    pairs: int
    """Query-key pairs of rows with more than one new token."""
    moves: int
    """KV blocks copied, swapped out or swapped in."""
    sent: int = 0
    """Tokens of other steps that the event loop sends while the step runs."""
    read: float = 0
    """Requests that the event loop reads while the step runs."""

    @property
    def verifies_drafts(self) -> bool:
        """Whether the step samples more tokens than it has requests."""
        return self.samples > self.rows

    def with_master_work(self, sent: int, read: float) -> StepShape:
        """Return the step with other work of the master beside it."""
        return tuple.__new__(StepShape, (*self[:6], sent, read))  # twice as fast as the constructor


def shape_of_rows(
    query_lens: np.ndarray[tuple[int], np.dtype[np.int32]],
    num_computed: np.ndarray[tuple[int], np.dtype[np.int32]],
    num_samples: int,
    num_moves: int,
) -> StepShape:
    """Return the shape of a step.

    Args:
        query_lens: [B], int32, new tokens of each row.
        num_computed: [B], int32, tokens of each row that are already in the KV cache.
        num_samples: Sampled tokens.
        num_moves: KV blocks moved.
    """
    queries, before = query_lens.astype(np.int64), num_computed.astype(np.int64)
    tokens = int(queries.sum())
    pairs = (queries * before + queries * (queries + 1) // 2)[queries > 1].sum()
    return StepShape(len(queries), tokens, num_samples, int(before.sum()) + tokens, int(pairs), num_moves)


CONSTANT: Final = "step"
"""Quantity of the term that counts once a step."""
QUANTITIES: Final = (CONSTANT, *StepShape._fields)

_Plan = tuple[tuple[int, float, float, float], ...]
"""(index in `StepShape`, above, to, seconds) of each term."""
_NUM_ROW_QUANTITIES: Final = StepShape._fields.index("samples") + 1


@dataclass(frozen=True, slots=True)
class CostTerm:
    """`seconds` for each unit of the quantity `of` between `above` and `to`."""

    of: str
    seconds: float
    above: float = 0.0
    to: float | None = None
    """None: unbounded."""

    def __str__(self) -> str:
        if self.of == CONSTANT:
            return f"{1e6 * self.seconds:.4g} us a step"
        span = f" {self.above:g} to {self.to:g}" if self.to is not None else f" above {self.above:g}"
        return f"{1e6 * self.seconds:.4g} us for each of {self.of}{span if self.above or self.to is not None else ''}"


@dataclass(frozen=True)
class CostModel:
    """A sum of cost terms; without terms it is 0 s."""

    terms: tuple[CostTerm, ...] = ()
    _plan: _Plan = field(init=False, repr=False, compare=False, default=())
    """Terms over quantities that change with every step."""
    _row_plan: _Plan = field(init=False, repr=False, compare=False, default=())
    """Terms over rows, tokens and samples, of which consecutive steps share few values."""
    _constant: float = field(init=False, repr=False, compare=False, default=0.0)
    _cache: dict[tuple[float, ...], float] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Seconds of `_constant` and `_row_plan` by rows, tokens and samples."""

    def __post_init__(self) -> None:
        plan = [
            (StepShape._fields.index(each.of), each.above, float("inf") if each.to is None else each.to, each.seconds)
            for each in self.terms
            if each.of != CONSTANT
        ]
        object.__setattr__(self, "_plan", tuple(each for each in plan if each[0] >= _NUM_ROW_QUANTITIES))
        object.__setattr__(self, "_row_plan", tuple(each for each in plan if each[0] < _NUM_ROW_QUANTITIES))
        object.__setattr__(self, "_constant", sum(each.seconds for each in self.terms if each.of == CONSTANT))

    def seconds(self, shape: StepShape) -> float:
        """Return the predicted duration of a step of this shape."""
        key = shape[:_NUM_ROW_QUANTITIES]
        total = self._cache.get(key)
        if total is None:
            total = self._cache[key] = _sum(self._row_plan, shape, self._constant)
        return _sum(self._plan, shape, total) if self._plan else total


def _sum(plan: _Plan, shape: StepShape, total: float) -> float:
    for index, above, to, seconds in plan:
        amount = shape[index]
        if amount > above:
            total += seconds * ((amount if amount < to else to) - above)
    return total


def segments(of: str, ends: Sequence[float]) -> list[CostTerm]:
    """Return consecutive terms of one second a unit that end at `ends`; the last one is unbounded."""
    starts = [0.0, *ends]
    return [CostTerm(of, 1.0, start, end) for start, end in zip(starts, [*ends, None], strict=True)]
