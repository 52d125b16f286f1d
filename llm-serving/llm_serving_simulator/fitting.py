"""Fits cost models to measured steps by non-negative least squares of the relative error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_serving_simulator.profile import CONSTANT, CostModel, CostTerm, StepShape, segments
from llm_serving_simulator.recordings import MeasuredStep

Array = NDArray[np.float64]

TOKEN_KNOTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
"""New tokens of a step at which the cost of one more token may change: matrix products work on tiles of tokens."""
STEP_TERMS: Final = (
    CostTerm(CONSTANT, 1.0),
    *segments("tokens", TOKEN_KNOTS),
    *(CostTerm(of, 1.0) for of in ("rows", "samples", "context", "pairs", "moves", "sent", "read")),
)
"""Candidates for the time of a WorkAgent; `sent` and `read` cover cores that the WorkAgent shares with the master."""
MASTER_TERMS: Final = (CostTerm(CONSTANT, 1.0), *(CostTerm(of, 1.0) for of in ("rows", "tokens", "samples", "moves")))
"""Candidates for the time in which the master processes a reply."""
FORM_TERMS: Final = (CostTerm(CONSTANT, 1.0), CostTerm("rows", 1.0))
"""Candidates for the time in which the master schedules and sends a step."""
MIN_AHEAD: Final = 50
"""Steps scheduled ahead that are needed to separate the master's time from the WorkAgent's."""
OUTLIER: Final = 3.0
"""Ratio of measured to predicted time above which a measurement is clipped: another program caused the rest."""
NUM_ITERATIONS: Final = 4
HELD_OUT: Final = 5
"""One measurement of this many is held out, to estimate the error."""
MIN_PER_TERM: Final = 3
"""Measurements that must reach a term for it to be fitted."""
SPREAD_QUANTILES: Final = 41


class ConditionalTerms(NamedTuple):
    """Terms that only some of the measurements have."""

    candidates: Sequence[CostTerm]
    holds: Sequence[bool]
    """Whether each measurement has the terms."""


class Fit(NamedTuple):
    """A fitted cost model and its error on held-out measurements."""

    model: CostModel
    conditional: CostModel
    num_fitted: int
    num_held_out: int
    median_error: float
    """Relative error."""
    p95_error: float
    spread: tuple[float, ...]
    """Evenly spaced quantiles of measured over predicted time."""
    tested: tuple[tuple[StepShape, float], ...] = ()
    """Shape, and measured over predicted time, of each held-out measurement."""

    def seconds(self, shape: StepShape, conditional: bool) -> float:
        """Return the predicted time, with or without the conditional terms."""
        return self.model.seconds(shape) + (self.conditional.seconds(shape) if conditional else 0.0)


def usable_steps(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Return the steps to fit: those scheduled ahead, and others only without prompts, because they include the
    master's time, which is long beside a short decode step only. If too few were scheduled ahead, return all.
    """
    if sum(each.ahead for each in steps) < MIN_AHEAD:
        return [*steps]
    return [each for each in steps if each.ahead or each.shape.tokens == each.shape.samples]


def fit_steps(steps: Sequence[MeasuredStep], seconds: Sequence[float], seed: int = 1, held_out: bool = True) -> Fit:
    """Fit the duration `seconds` of each step; the conditional terms are what a step takes longer that was not
    scheduled ahead. `steps`: from `usable_steps`, and those that verify draft tokens. `seed`: selects the steps that
    are held out.
    """
    separable = sum(each.ahead for each in steps) >= MIN_AHEAD
    forming = ConditionalTerms(FORM_TERMS if separable else (), [not each.ahead for each in steps])
    return fit([each.shape for each in steps], seconds, STEP_TERMS, seed, held_out, forming)


def fit(
    shapes: Sequence[StepShape],
    seconds: Sequence[float],
    candidates: Sequence[CostTerm],
    seed: int = 1,
    held_out: bool = True,
    conditional: ConditionalTerms | None = None,
) -> Fit:
    """Fit a sum of the candidates to measured times.

    Frequent shapes do not outweigh rare ones: all shapes of about one size together weigh the square root of their
    count. Errors are relative to the prediction of the iteration before (iteratively reweighted least squares). Unlike
    weights by the measured time, these predict the mean of noisy times.

    Args:
        shapes: Shapes of the steps.
        seconds: Measured time of each step.
        candidates: Terms of one second a unit.
        seed: Selects the held-out measurements.
        held_out: Whether measurements are held out.
        conditional: Terms that are fitted together with the candidates.

    Returns:
        The fit; without measurements a model of 0 s.
    """
    table = np.array(shapes, np.float64).reshape(-1, len(StepShape._fields))
    measured = np.array(seconds, np.float64)
    tests = np.random.default_rng(seed).integers(HELD_OUT, size=len(measured)) == 0
    if not held_out or tests.all() or not tests.any():
        tests = np.zeros(len(measured), bool)
    extra = conditional or ConditionalTerms((), np.zeros(len(measured), bool).tolist())
    holds = np.array(extra.holds, bool)
    columns = [_amounts(term, table) for term in candidates]
    columns += [holds * _amounts(term, table) for term in extra.candidates]
    matrix = np.column_stack(columns)
    reached = (matrix[~tests] > 0).sum(axis=0) >= MIN_PER_TERM
    coefficients = np.zeros(len(reached))
    coefficients[reached] = _reweighted(matrix[~tests][:, reached], measured[~tests], _weights(table[~tests]))
    model = _model(candidates, coefficients[: len(candidates)])
    conditional_model = _model(extra.candidates, coefficients[len(candidates) :])
    if not len(measured):
        return Fit(model, conditional_model, 0, 0, 0.0, 0.0, (1.0,) * SPREAD_QUANTILES)
    tested = tests if tests.any() else ~tests
    rows = [StepShape(*row) for row in table[tested].tolist()]
    predicted = np.array([model.seconds(each) for each in rows])
    predicted += holds[tested] * [conditional_model.seconds(each) for each in rows]
    ratios = measured[tested] / np.maximum(predicted, 1e-9)
    errors = np.abs(ratios - 1)
    spread = np.quantile(ratios, np.linspace(0, 1, SPREAD_QUANTILES))
    return Fit(
        model,
        conditional_model,
        int((~tests).sum()),
        int(tests.sum()),
        float(np.median(errors)),
        float(np.quantile(errors, 0.95)),
        tuple(float(f"{each:.4g}") for each in np.clip(spread, 1e-3, OUTLIER)),
        tuple(zip(rows, ratios.tolist(), strict=True)),
    )


def _amounts(term: CostTerm, table: Array) -> Array:
    if term.of == CONSTANT:
        return np.ones(len(table))
    amounts = table[:, StepShape._fields.index(term.of)]
    return np.clip(amounts, term.above, np.inf if term.to is None else term.to) - term.above


def _weights(table: Array) -> Array:
    """Return the weight of each measurement, by the number of measurements of about its size."""
    sizes = np.round(2 * np.log2(1 + table[:, :2])).astype(np.int64)
    _, groups, counts = np.unique(sizes, axis=0, return_inverse=True, return_counts=True)
    return np.asarray(counts[groups.ravel()] ** -0.25, np.float64)


def _reweighted(matrix: Array, measured: Array, weights: Array) -> Array:
    predicted = measured
    coefficients = np.zeros(matrix.shape[1])
    for _ in range(NUM_ITERATIONS):
        scale = weights / np.maximum(predicted, 1e-7)
        coefficients = least_squares(matrix * scale[:, None], np.minimum(measured, OUTLIER * predicted) * scale)
        predicted = np.maximum(matrix @ coefficients, 1e-7)
    return coefficients


def least_squares(matrix: Array, target: Array) -> Array:
    """Return the x >= 0, [n], that minimizes ||matrix x - target|| for a matrix [m, n] and a target [m] in float64. It
    is solved with columns of norm 1; a column of zeros gets 0.
    """
    from scipy.optimize import nnls

    if not matrix.size:
        return np.zeros(matrix.shape[1])
    norms = np.linalg.norm(matrix, axis=0)
    scale = np.where(norms > 0, norms, 1.0)
    solution, _ = nnls(matrix / scale, target, maxiter=max(1000, 30 * len(scale)))
    return np.asarray(solution / scale, np.float64)


def _model(terms: Sequence[CostTerm], coefficients: Array) -> CostModel:
    return CostModel(
        tuple(
            CostTerm(term.of, float(f"{seconds:.4g}"), term.above, term.to)
            for term, seconds in zip(terms, coefficients.tolist(), strict=True)
            if seconds > 0
        )
    )
