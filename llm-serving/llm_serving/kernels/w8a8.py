"""Linear layers of 8-bit weights and 8-bit activations, in NumPy: what csrc/w8a8.h computes, bit by bit.

Each row of activations, and each output of the weight, has a scale: its largest magnitude / 127. Sums of products of
quantized values are exact, so every instruction set gives these bits. Subnormal numbers count as zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_serving.kernels.rotation import Singles, rotate, without_subnormals

Floats = NDArray[np.floating[Any]]
Int8Values = NDArray[np.integer[Any]]

MIN_LARGEST = np.float32(2.0**-100)
"""A row whose largest magnitude is smaller than this counts as zeros."""


def linear(x: Floats, qvalues: Int8Values, scales: Singles, rotated: bool = False) -> Singles:
    """Multiply x [M, K] by the transposed weight [N, K]. Return [M, N] in float32, before rounding to the model dtype.

    Args:
        x: Values that float32 represents exactly. Rows with infinity or NaN become NaN.
        qvalues: int8, at most 65,536 columns.
        scales: float32 [N].
        rotated: Whether the weight was rotated (rotation.py). The rows of x are then rotated too.
    """
    rows, row_scales = quantize_rows(rotate(x) if rotated else x)
    # float64 represents every sum of 65,536 products of 7 and 8 bits exactly.
    sums = (rows.astype(np.float64) @ qvalues.astype(np.float64).T).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return without_subnormals(without_subnormals(sums * scales) * row_scales[:, None])


def quantize_rows(x: Floats) -> tuple[NDArray[np.int8], Singles]:
    """Return quantized values [M, K] in -127..127, and scales [M]: x is about quantized value * scale."""
    values = without_subnormals(x.astype(np.float32))
    largest = np.abs(values).max(axis=1, initial=0)
    finite, used = np.isfinite(largest), largest >= MIN_LARGEST
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factors = np.where(finite & used, np.float32(127) / largest, np.float32(0))
        values = np.where(finite[:, None], values, np.float32(0))
        row_scales = np.where(used, largest / np.float32(127), np.float32(0))
    qvalues = np.rint(values * factors[:, None]).astype(np.int8)
    return qvalues, np.where(finite, row_scales, np.float32(np.nan)).astype(np.float32)
