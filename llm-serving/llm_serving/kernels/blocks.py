"""Products of weights in GGUF blocks with rows of 8 bits, in NumPy: what csrc/blocks.h computes, bit by bit.

Every 32 inputs of an activation row share a scale. Sums within a group are exact integers, and groups are added in
float32 in ascending order, so that every instruction set gives these bits. Subnormal numbers count as zero.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from llm_serving.kernels.rotation import Singles, without_subnormals
from llm_serving.kernels.w8a8 import Floats, quantize_rows

BLOCK: Final = 32
"""Number of inputs of an activation row that share a scale."""


def linear(
    x: Floats, qvalues: NDArray[np.uint8], zero: int, scales: Singles, minima: Singles | None, group_size: int
) -> Singles:
    """Multiply x [M, K] by the transposed weight [N, K]. Return [M, N] in float32, before rounding to the model dtype.

    Args:
        x: Values that float32 represents exactly. A block with infinity or NaN makes the whole result row NaN.
        qvalues: Unsigned quantized values of the weight.
        zero: The quantized value that stands for 0.
        scales, minima: [N, groups]; minima may be None.
        group_size: Columns of a group, 16 or 32.
    """
    m, k = x.shape
    rows, row_scales = quantize_rows(x.reshape(-1, BLOCK))
    groups = rows.reshape(m, -1, group_size).astype(np.float64)
    row_scales = np.repeat(row_scales.reshape(m, -1), BLOCK // group_size, axis=1)
    totals = np.zeros((m, len(qvalues)), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for group in range(k // group_size):
            columns = slice(group * group_size, (group + 1) * group_size)
            numbers = qvalues[:, columns].astype(np.float64) - zero
            sums = (groups[:, group] @ numbers.T).astype(np.float32)
            value = without_subnormals(sums * scales[:, group])
            if minima is not None:
                row_sums = groups[:, group].sum(axis=1).astype(np.float32)
                value = without_subnormals(value - without_subnormals(row_sums[:, None] * minima[:, group]))
            value = without_subnormals(value * row_scales[:, group, None])
            totals = without_subnormals(totals + value)
    return totals
