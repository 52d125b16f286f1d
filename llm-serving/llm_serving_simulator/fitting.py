"""From measured times to a cost model: linear pieces, found by least squares of the relative error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_serving_simulator.cost_model import CONSTANT, CostModel, Piece, segments
from llm_serving_simulator.non_negative import solve
from llm_serving_simulator.step_shape import StepShape

Array = NDArray[np.float64]

TOKEN_KNOTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""New tokens of a step where the cost of one more may change: products of matrices take tiles of them at a time."""
STEP_PIECES: Final = (
    Piece(CONSTANT, 1.0),
    *segments("tokens", TOKEN_KNOTS),
    *(Piece(of, 1.0) for of in ("rows", "samples", "context", "pairs", "moves", "sent", "read")),
)
"""What the time of a WorkAgent may be made of; `sent` and `read` are what the cores that it shares are taken for."""
MASTER_PIECES: Final = (Piece(CONSTANT, 1.0), *(Piece(of, 1.0) for of in ("rows", "tokens", "samples", "moves")))
"""What the time of the master may be made of."""
OUTLIER: Final = 3.0
"""Times the prediction, beyond which a time counts as that, in fit and spread: something else took it."""
ROUNDS: Final = 4
HELD_OUT: Final = 5
"""Of so many measurements one is not fitted, and tells the error."""
MIN_PER_PIECE: Final = 3
"""Measurements that a piece must reach."""
SPREAD_QUANTILES: Final = 41


class Sometimes(NamedTuple):
    """What costs something in some of the measurements only."""

    candidates: Sequence[Piece]
    """Pieces of one second a unit."""
    holds: Sequence[bool]
    """Of each measurement, whether it has these."""


class Fit(NamedTuple):
    model: CostModel
    sometimes: CostModel
    """Of the measurements that have more to them."""
    num_fitted: int
    num_held_out: int
    median_error: float
    """Of the held-out measurements, relative."""
    p95_error: float
    spread: tuple[float, ...]
    """Quantiles, evenly spaced, of measured over predicted of those held out."""
    tested: tuple[tuple[StepShape, float], ...] = ()
    """Shape, and measured over predicted, of each that was held out."""

    def seconds(self, shape: StepShape, has_more: bool) -> float:
        return self.model.seconds(shape) + (self.sometimes.seconds(shape) if has_more else 0.0)


def fit(
    shapes: Sequence[StepShape],
    seconds: Sequence[float],
    candidates: Sequence[Piece],
    seed: int = 1,
    held_out: bool = True,
    sometimes: Sometimes | None = None,
) -> Fit:
    """Fits a sum of the candidates to measured seconds.

    Shapes that are frequent do not outweigh the others: all shapes of about one size weigh as much as their square
    root. Errors are relative to what was predicted in the round before (iteratively reweighted least squares), which,
    unlike weighting by what was measured, predicts means of noisy times.

    Args:
        shapes: Of the steps.
        seconds: That each took.
        candidates: Pieces of one second a unit.
        seed: Draws what is held out.
        held_out: Whether anything is.
        sometimes: Is fitted together with the candidates.

    Returns:
        What was found; of no measurements a model of 0 s.
    """
    table = np.array(shapes, np.float64).reshape(-1, len(StepShape._fields))
    measured = np.array(seconds, np.float64)
    tests = np.random.default_rng(seed).integers(HELD_OUT, size=len(measured)) == 0
    if not held_out or tests.all() or not tests.any():
        tests = np.zeros(len(measured), bool)
    extra = sometimes or Sometimes((), np.zeros(len(measured), bool).tolist())
    holds = np.array(extra.holds, bool)
    columns = [_amounts(piece, table) for piece in candidates]
    columns += [holds * _amounts(piece, table) for piece in extra.candidates]
    matrix = np.column_stack(columns)
    reached = (matrix[~tests] > 0).sum(axis=0) >= MIN_PER_PIECE
    found = np.zeros(len(reached))
    found[reached] = _solved(matrix[~tests][:, reached], measured[~tests], _weights(table[~tests]))
    model = _merged(candidates, found[: len(candidates)])
    apart = _merged(extra.candidates, found[len(candidates) :])
    if not len(measured):
        return Fit(model, apart, 0, 0, 0.0, 0.0, (1.0,) * SPREAD_QUANTILES)
    tested = tests if tests.any() else ~tests
    rows = [StepShape(*row) for row in table[tested].tolist()]
    predicted = np.array([model.seconds(each) for each in rows]) + holds[tested] * [
        apart.seconds(each) for each in rows
    ]
    ratios = measured[tested] / np.maximum(predicted, 1e-9)
    errors = np.abs(ratios - 1)
    spread = np.quantile(ratios, np.linspace(0, 1, SPREAD_QUANTILES))
    return Fit(
        model,
        apart,
        int((~tests).sum()),
        int(tests.sum()),
        float(np.median(errors)),
        float(np.quantile(errors, 0.95)),
        tuple(float(f"{each:.4g}") for each in np.clip(spread, 1e-3, OUTLIER)),
        tuple(zip(rows, ratios.tolist(), strict=True)),
    )


def _amounts(piece: Piece, table: Array) -> Array:
    if piece.of == CONSTANT:
        return np.ones(len(table))
    amounts = table[:, StepShape._fields.index(piece.of)]
    return np.clip(amounts, piece.above, np.inf if piece.to is None else piece.to) - piece.above


def _weights(table: Array) -> Array:
    """Of each measurement, by how many have about its size."""
    sizes = np.round(2 * np.log2(1 + table[:, :2])).astype(np.int64)
    _, places, counts = np.unique(sizes, axis=0, return_inverse=True, return_counts=True)
    return np.asarray(counts[places.ravel()] ** -0.25, np.float64)


def _solved(matrix: Array, measured: Array, weights: Array) -> Array:
    predicted = measured
    coefficients = np.zeros(matrix.shape[1])
    for _ in range(ROUNDS):
        scale = weights / np.maximum(predicted, 1e-7)
        coefficients = solve(matrix * scale[:, None], np.minimum(measured, OUTLIER * predicted) * scale)
        predicted = np.maximum(matrix @ coefficients, 1e-7)
    return coefficients


def _merged(pieces: Sequence[Piece], coefficients: Array) -> CostModel:
    """Without the pieces that cost nothing."""
    return CostModel(
        tuple(
            Piece(piece.of, float(f"{seconds:.4g}"), piece.above, piece.to)
            for piece, seconds in zip(pieces, coefficients.tolist(), strict=True)
            if seconds > 0
        )
    )
