"""Linear layers of quantized weights and 8-bit activations, in NumPy: what csrc computes, bit by bit.

A sum of products of quantized values is an exact integer. Sums of groups are added in float32 in ascending order.
`w8a8` and `w4a8` fuse nothing, so every instruction set gives these bits. `blocks` has two fused multiply-adds for each
group, which the instruction set `plain` lacks: `is_fused=False` gives its bits. Subnormal numbers count as zero.

The linear functions multiply x [M, K] by a transposed weight [N, K] and return [M, N] in float32, before rounding to
the model dtype. float32 must represent the values of x exactly. Rows of x with infinity or NaN become NaN.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Singles = NDArray[np.float32]
Int8Values = NDArray[np.integer[Any]]

W4A8_ZERO: Final = 8
BLOCK: Final = 32
"""Number of inputs of an activation row that share a scale, for weights in GGUF blocks."""
MIN_LARGEST: Final = np.float32(2.0**-100)
"""A row whose largest magnitude is smaller than this counts as zeros."""
_MAX_ROTATED: Final = 128
_MIN_ROTATED: Final = 16
_SMALLEST_NORMAL: Final = np.float32(2.0**-126)


def w8a8(x: Floats, qvalues: Int8Values, scales: Singles, rotated: bool = False) -> Singles:
    """Multiply by 8-bit weights of at most 65,536 columns (csrc/w8a8.h). If the weight is `rotated`, rotate x too."""
    rows, row_scales = quantize_rows(rotate(x) if rotated else x)
    # float64 represents every sum of 65,536 products of 7 and 8 bits exactly.
    sums = (rows.astype(np.float64) @ qvalues.astype(np.float64).T).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return without_subnormals(without_subnormals(sums * scales) * row_scales[:, None])


def w4a8(
    x: Floats,
    qvalues: NDArray[np.uint8],
    scales: Singles,
    zeros: NDArray[np.uint8] | None,
    group_size: int,
    rotated: bool = False,
) -> Singles:
    """Multiply by 4-bit weights of at most 65,536 columns in groups, the last of which may be smaller (csrc/w4a8.h).
    `scales` and `zeros` are [N, groups]. If `zeros` is None, zero points are `W4A8_ZERO`. `rotated` is that of `w8a8`.
    """
    rows, row_scales = quantize_rows(rotate(x) if rotated else x)
    totals = np.zeros((len(rows), len(qvalues)), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for group in range(scales.shape[1]):
            columns = slice(group * group_size, (group + 1) * group_size)
            zero = W4A8_ZERO if zeros is None else zeros[:, group, None].astype(np.float64)
            numbers = qvalues[:, columns].astype(np.float64) - zero
            sums = (rows[:, columns].astype(np.float64) @ numbers.T).astype(np.float32)
            totals = without_subnormals(totals + without_subnormals(sums * scales[:, group]))
        return without_subnormals(totals * row_scales[:, None])


def blocks(
    x: Floats,
    qvalues: NDArray[np.uint8],
    zero: int,
    scales: Singles,
    minima: Singles | None,
    group_size: int,
    *,
    is_fused: bool = True,
) -> Singles:
    """Multiply by weights in GGUF blocks (csrc/blocks.h). Every `BLOCK` inputs of a row of x share a scale. `scales`
    and `minima` are [N, groups]; a group has 16 or 32 columns. If `minima` is None, the quantized value `zero`
    represents 0; otherwise `zero` is not used. `is_fused`: whether the instruction set has fused multiply-adds.
    """
    m, k = x.shape
    weights = qvalues.astype(np.float64) - (0 if minima is not None else zero)
    rows, row_scales = quantize_rows(x.reshape(-1, BLOCK))
    groups = rows.reshape(m, -1, group_size).astype(np.float64)
    row_scales = np.repeat(row_scales.reshape(m, -1), BLOCK // group_size, axis=1)
    totals = np.zeros((m, len(qvalues)), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for group in range(k // group_size):
            columns = slice(group * group_size, (group + 1) * group_size)
            sums = (groups[:, group] @ weights[:, columns].T).astype(np.float32)
            scale = row_scales[:, group, None]
            terms = [(without_subnormals(sums * scales[:, group]), scale)]
            if minima is not None:
                negative_sums = (0 - groups[:, group].sum(axis=1)).astype(np.float32)[:, None]
                terms.append((minima[:, group], without_subnormals(negative_sums * scale)))
            for a, b in terms:
                if is_fused:
                    totals = without_subnormals(fused(a, b, totals))
                else:
                    totals = without_subnormals(totals + without_subnormals(a * b))
    return totals


def quantize_rows(x: Floats) -> tuple[NDArray[np.int8], Singles]:
    """Return quantized values [M, K] in -127..127, and scales [M], the largest magnitudes / 127."""
    values = without_subnormals(x.astype(np.float32))
    largest = np.abs(values).max(axis=1, initial=0)
    finite, used = np.isfinite(largest), largest >= MIN_LARGEST
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factors = np.where(finite & used, np.float32(127) / largest, np.float32(0))
        values = np.where(finite[:, None], values, np.float32(0))
        row_scales = np.where(used, largest / np.float32(127), np.float32(0))
    qvalues = np.rint(values * factors[:, None]).astype(np.int8)
    return qvalues, np.where(finite, row_scales, np.float32(np.nan)).astype(np.float32)


def fused(a: Singles, b: Singles | np.float32, c: Singles | np.float32) -> Singles:
    """Return a * b + c, rounded once.

    float64 represents the product exactly. The sum is rounded to odd: an inexact sum becomes the neighbour in float64
    whose last bit is 1. Rounding this number to float32 then equals rounding the exact sum (Boldo and Melquiond 2008).
    """
    product = a.astype(np.float64) * b
    total = product + c
    c_part = total - product
    error = (product - (total - c_part)) + (c - c_part)
    is_even = total.view(np.int64) % 2 == 0
    towards = np.where(error > 0, np.inf, -np.inf)
    total = np.where(is_even & ((error > 0) | (error < 0)), np.nextafter(total, towards), total)
    result: Singles = total.astype(np.float32)
    return result


def rotate(x: Floats) -> Singles:
    """Multiply each block of the rows [..., size] by the Hadamard matrix H, in stages of sums and differences
    (csrc/rotation.h).

    H, whose elements are 1 and -1, spreads a large number over its block, so that rounding with a single scale loses
    less precision of the other numbers (QuaRot, Ashkboos et al. 2024). H * H is the identity times the block size, so
    the product of two rotated rows is the product of the rows times the block size.
    """
    values = without_subnormals(x.astype(np.float32))
    block = rotated_block(x.shape[-1])
    stride = 1
    with np.errstate(over="ignore", invalid="ignore"):
        while stride < block:
            pairs = values.reshape(-1, 2, stride)
            sums, differences = pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]
            values = without_subnormals(np.stack([sums, differences], axis=1)).reshape(x.shape)
            stride *= 2
    return values


def rotated_block(size: int) -> int:
    """Return the block size in which `rotate` rotates rows of `size` elements: the largest power of two up to 128 that
    divides `size`. If this power is below 16, return 1, so that rows are not rotated.
    """
    block = min(size & -size, _MAX_ROTATED)
    return block if block >= _MIN_ROTATED else 1


def without_subnormals(values: Singles) -> Singles:
    """Replace subnormal numbers by zeros of the same sign, as the kernels do."""
    return np.where(np.abs(values) < _SMALLEST_NORMAL, np.copysign(np.float32(0), values), values)
