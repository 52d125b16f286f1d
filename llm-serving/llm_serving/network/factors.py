"""Functions that make weights: constants, and tensors of the checkpoint times a factor."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from llm_serving.network.operations import Float32Array, Transform


@dataclass(frozen=True)
class Constant:
    """Generates a vector of equal elements. It is used as `Weight.generate`."""

    size: int
    value: float

    def __call__(self, _: int) -> Float32Array:
        return np.full(self.size, self.value, np.float32)


@dataclass(frozen=True)
class PaddedMeanScale:
    """Scales a norm weight, because zero padding of the rows makes their mean square smaller.

    `share`: unpadded fraction of the columns. `transform`: applied to the norm weight first.
    """

    share: float
    transform: Transform | None

    def __call__(self, gamma: Float32Array) -> Float32Array:
        changed = gamma if self.transform is None else self.transform(gamma)
        return changed * np.float32(math.sqrt(self.share))


@dataclass(frozen=True)
class Scaled:
    """A `Weight.transform` that multiplies a weight by a factor."""

    factor: float

    def __call__(self, weight: Float32Array) -> Float32Array:
        return weight * np.float32(self.factor)


@dataclass(frozen=True)
class RowFactors:
    """A `Weight.transform` that multiplies each row of a weight by a factor.

    `parts`: (number of consecutive rows, factor). `rows`: the rows of the whole weight that one of several ranks has;
    None: all.
    """

    parts: tuple[tuple[int, float], ...]
    rows: tuple[int, ...] | None = None

    def __call__(self, weight: Float32Array) -> Float32Array:
        counts, factors = zip(*self.parts, strict=True)
        of_rows = np.repeat(np.array(factors, np.float32), counts)[
            slice(None) if self.rows is None else list(self.rows)
        ]
        scaled: Float32Array = weight * of_rows[:, None]
        return scaled

    def of_rows(self, rows: tuple[int, ...]) -> RowFactors:
        """Return the factors of these rows."""
        return replace(self, rows=rows if self.rows is None else tuple(self.rows[row] for row in rows))
