"""Linear layers of 4-bit weights in groups and 8-bit activations, in NumPy: what csrc/w4a8.h computes, bit by bit.

Sums within a group are exact integers, and groups are added in float32 in ascending order, so that every instruction
set gives these bits. Subnormal numbers count as zero.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from llm_serving.kernels.rotation import Singles, rotate, without_subnormals
from llm_serving.kernels.w8a8 import Floats, quantize_rows

ZERO: Final = 8


def linear(
    x: Floats,
    qvalues: NDArray[np.uint8],
    scales: Singles,
    zeros: NDArray[np.uint8] | None,
    group_size: int,
    rotated: bool = False,
) -> Singles:
    """Multiply x [M, K] by the transposed weight [N, K]. Return [M, N] in float32, before rounding to the model dtype.

    Args:
        x: Values that float32 represents exactly. Rows with infinity or NaN become NaN.
        qvalues: 0 to 15, at most 65,536 columns.
        scales, zeros: [N, groups], the scales and zero points; zeros None: `ZERO`.
        group_size: Columns of a group; the last may be shorter.
        rotated: Whether the weight was rotated (rotation.py). The rows of x are then rotated too.
    """
    rows, row_scales = quantize_rows(rotate(x) if rotated else x)
    totals = np.zeros((len(rows), len(qvalues)), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for group in range(scales.shape[1]):
            columns = slice(group * group_size, (group + 1) * group_size)
            zero = ZERO if zeros is None else zeros[:, group, None].astype(np.float64)
            numbers = qvalues[:, columns].astype(np.float64) - zero
            sums = (rows[:, columns].astype(np.float64) @ numbers.T).astype(np.float32)
            totals = without_subnormals(totals + without_subnormals(sums * scales[:, group]))
        return without_subnormals(totals * row_scales[:, None])
