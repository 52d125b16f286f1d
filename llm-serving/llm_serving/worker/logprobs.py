"""Log-probabilities of the model's own distribution: before penalties, bias and temperature."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]


def log_normalizers(logits: Float32Array) -> NDArray[np.float64]:
    """log(sum(exp(logits))) of each row; [rows, V] -> [rows].

    The sum runs along contiguous rows, so that a row's bits do not depend on the rows beside it.
    """
    largest = logits.max(axis=1)
    total = np.exp(logits - largest[:, None]).sum(axis=1)
    normalizers: NDArray[np.float64] = largest.astype(np.float64) + np.log(total.astype(np.float64))
    return normalizers


def most_likely(values: Float32Array, count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest of `values` ([V], no NaN), largest first, among equals the lowest index first."""
    size = len(values)
    count = min(count, size)
    if count == 1:
        return np.array([values.argmax()])
    if count < size:
        threshold = np.partition(values, size - count)[size - count]
        candidates = np.flatnonzero(values >= threshold)
    else:
        candidates = np.arange(size)
    order = np.argsort(-values[candidates], kind="stable")
    ranked: NDArray[np.intp] = candidates[order[:count]]
    return ranked
