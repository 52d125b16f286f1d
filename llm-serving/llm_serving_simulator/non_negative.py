"""Least squares with coefficients that are not negative."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def solve(matrix: Array, target: Array) -> Array:
    """The x >= 0 with the least ||matrix x - target||.

    The active-set algorithm NNLS of Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23, on columns
    scaled to one length; a column of zeros gets 0.

    Args:
        matrix: [m, n], float64.
        target: [m], float64.

    Returns:
        [n], float64.
    """
    lengths = np.linalg.norm(matrix, axis=0)
    scale = np.where(lengths > 0, lengths, 1.0)
    scaled = matrix / scale
    gram, right = scaled.T @ scaled, scaled.T @ target
    count = len(scale)
    passive = np.zeros(count, bool)
    solution = np.zeros(count)
    tolerance = 1e-10 * max(1.0, float(np.abs(right).max(initial=0.0)))
    for _ in range(3 * count):
        gradient = np.where(passive | (lengths == 0), -np.inf, right - gram @ solution)
        enters = int(np.argmax(gradient))
        if gradient[enters] <= tolerance:
            break
        passive[enters] = True
        while True:
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(gram[np.ix_(passive, passive)], right[passive], rcond=None)[0]
            negative = passive & (trial <= 0)
            if not negative.any():
                break
            step = np.min(solution[negative] / np.maximum(solution[negative] - trial[negative], 1e-300))
            solution += step * (trial - solution)
            passive &= solution > 1e-14
            solution[~passive] = 0.0
            if not passive.any():
                break
        solution = np.where(passive, trial, 0.0)
    return np.asarray(solution / scale, np.float64)
