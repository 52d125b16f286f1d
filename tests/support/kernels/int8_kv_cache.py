"""The int8 KV cache in NumPy: what csrc/paged_attention.cc stores and csrc/quantized_attention.h sums.

Each head of a token's key and value, and each head of a query, has a scale: its largest magnitude / 127. Queries and
keys are rotated first (`quantized_products.rotate`). A score is the exact sum of products of quantized values, times
both scales. The softmax weights of 64 tokens, times the scales of their values, are rounded to unsigned 8-bit integers
after an ordered dither is added, and sums of their products with quantized values are exact. These products are powers
of two: the logarithm of the scale is added to the score. The sum of the weights is that of the products divided by the
scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.kernels.quantized_products import Singles, fused, quantize_rows, rotate, rotated_block

Floats = NDArray[np.floating[Any]]
Doubles = NDArray[np.float64]

MAX_WEIGHT = np.float32(255)
"""Largest quantized product of a softmax weight and the scale of a value vector."""
DITHER = np.array([(int(f"{token:06b}"[::-1], 2) + 0.5) / 64 - 0.5 for token in range(64)], np.float32)
"""Added to the quantized weight of each token of a chunk before it is rounded to an integer: -1/2 to 1/2, ordered by
the reversed bits of the token's index.
"""

SMALLEST_SHARE, SMALLEST_SCALE = np.float32(2.0**-96), np.float32(2.0**-110)
"""Smallest scale of a value, relative to the largest one of the 64, and in all. Smaller ones count as these."""
EXPONENT_UNIT = np.float32(2**23)
FRACTION, ONE = 0x7FFFFF, 0x3F800000
LOG2 = [0.0451505648, -0.193579187, 0.415608682, -0.709097138, 1.44191708]
"""Coefficients of log2(1 + x) / x for x from 0 to 1."""
EXP2 = [19.6521011, -0.906829318, 120.11213, 116.142598]
"""Coefficients of MAX_WEIGHT * 2^(x - 1) for x from 1 to 2."""


def quantize_heads(x: Floats, num_heads: int) -> tuple[NDArray[np.int8], Singles]:
    """Quantize rows [T, num_heads*D] to [T, num_heads, D] with scales [T, num_heads]. The scale of a head with infinity
    or NaN is NaN.
    """
    qvalues, scales = quantize_rows(x.reshape(len(x) * num_heads, -1))
    return qvalues.reshape(len(x), num_heads, -1), scales.reshape(len(x), num_heads)


def quantize_rotated_heads(x: Floats, num_heads: int) -> tuple[NDArray[np.int8], Singles]:
    """Rotate queries or keys, then quantize them as `quantize_heads` does."""
    return quantize_heads(rotate(x.astype(np.float32).reshape(len(x), num_heads, -1)).reshape(x.shape), num_heads)


def restored(x: Floats, num_heads: int) -> Doubles:
    """Return value rows [T, num_heads*D] as attention reads them back from the int8 cache. The results are exact."""
    qvalues, scales = quantize_heads(x, num_heads)
    values: Doubles = qvalues * scales.astype(np.float64)[..., None]
    return values.reshape(x.shape)


def restored_rotated(x: Floats, num_heads: int) -> Doubles:
    """Return queries or keys as 8 bits represent them, rotated back and rounded to float64."""
    qvalues, scales = quantize_rotated_heads(x, num_heads)
    block = rotated_block(qvalues.shape[-1])
    matrix = rotate(np.eye(block, dtype=np.float32)).astype(np.float64)
    values = qvalues.reshape(*qvalues.shape[:2], -1, block) @ matrix / block * scales[..., None, None]
    return values.reshape(x.shape)


def weighted_sum(scores: Singles, values: Floats) -> Doubles:
    """Return the sum [D] of at most 64 values [S, D] of a head, weighted by the softmax of scores [S], which are in
    units of log 2.
    """
    qvalues, scales = quantize_rows(values)
    scales = np.maximum(scales, max(scales.max() * SMALLEST_SHARE, SMALLEST_SCALE))
    exponents = fused(scores, EXPONENT_UNIT, exponents_of(scales))
    products = scaled_powers(exponents - exponents.max())
    sums = np.rint(products + DITHER[: len(scores)]).astype(np.int64) @ qvalues.astype(np.int64)
    result: Doubles = sums / (products / scales).sum(dtype=np.float64)
    return result


def exponents_of(x: Singles) -> Singles:
    """Return log2(x) of positive numbers, in exponent units, within 2^-15.9."""
    bits = x.view(np.int32)
    whole = ((bits >> 23) - 127).astype(np.float32)
    r = (bits & FRACTION | ONE).view(np.float32) - np.float32(1)
    result: Singles = fused(polynomial(LOG2, r), r, whole) * EXPONENT_UNIT
    return result


def scaled_powers(x: Singles) -> Singles:
    """Return MAX_WEIGHT * 2^x for x of at most zero, in exponent units, within 2^-13.5 of its magnitude."""
    bits = np.maximum(x, -126 * EXPONENT_UNIT).astype(np.int32)
    p = polynomial(EXP2, (bits & FRACTION | ONE).view(np.float32))
    return (p.view(np.int32) + (bits & ~FRACTION)).view(np.float32)


def polynomial(coefficients: list[float], x: Singles) -> Singles:
    """Return the polynomial of `x`; its coefficients begin with that of the highest power."""
    result = np.full(x.shape, coefficients[0], np.float32)
    for coefficient in coefficients[1:]:
        result = fused(result, x, np.float32(coefficient))
    return result
