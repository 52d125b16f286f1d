"""Rotation of rows by Hadamard matrices before they are rounded, in NumPy: what csrc/rotation.h computes, bit by bit.

If one number of a row is far larger than the others, rounding with a single scale loses the precision of the others.
The Hadamard matrix H, whose elements are 1 and -1, spreads a large number over its block (QuaRot, Ashkboos et al.
2024). H * H is the identity times the block size, so the product of two rotated rows is the product of the rows times
the block size.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Singles = NDArray[np.float32]

MAX_BLOCK: Final = 128
MIN_BLOCK: Final = 16
_SMALLEST_NORMAL: Final = np.float32(2.0**-126)


def block_of(size: int) -> int:
    """Return the block size of the rotation for rows of `size` numbers: the largest power of two up to `MAX_BLOCK` that
    divides `size`; 1, no rotation, if that is below `MIN_BLOCK`.
    """
    block = min(size & -size, MAX_BLOCK)
    return block if block >= MIN_BLOCK else 1


def rotate(x: NDArray[np.floating[Any]]) -> Singles:
    """Multiply each block of the rows [..., size] by the Hadamard matrix, in stages of sums and differences."""
    values = without_subnormals(x.astype(np.float32))
    block = block_of(x.shape[-1])
    stride = 1
    with np.errstate(over="ignore", invalid="ignore"):
        while stride < block:
            pairs = values.reshape(-1, 2, stride)
            sums, differences = pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]
            values = without_subnormals(np.stack([sums, differences], axis=1)).reshape(x.shape)
            stride *= 2
    return values


def without_subnormals(values: Singles) -> Singles:
    """Replace subnormal numbers by zeros of the same sign, as the kernels do."""
    return np.where(np.abs(values) < _SMALLEST_NORMAL, np.copysign(np.float32(0), values), values)
