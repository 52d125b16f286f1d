"""The int8 KV cache in NumPy: what csrc/paged_attention.cc stores and csrc/quantized_attention.h sums.

Each head of a token's key and value, and each head of a query, has a scale: its largest magnitude / 127. Queries and
keys are rotated first (`quantized_products.rotate`). A score is the exact sum of products of quantized values, times
both scales. The softmax weights of 64 tokens, times the scales of their values, are rounded to unsigned 8-bit integers
after an ordered dither is added, and sums of their products with quantized values are exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.kernels.quantized_products import Singles, quantize_rows, rotate, rotated_block

Floats = NDArray[np.floating[Any]]
Doubles = NDArray[np.float64]

MAX_WEIGHT = np.float32(255)
"""Largest quantized product of a softmax weight and the scale of a value vector."""
DITHER = np.array([(int(f"{token:06b}"[::-1], 2) + 0.5) / 64 - 0.5 for token in range(64)], np.float32)
"""Added to the quantized weight of each token of a chunk before it is rounded to an integer: -1/2 to 1/2, ordered by
the reversed bits of the token's index.
"""


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


def weighted_sum(weights: Singles, values: Floats) -> Singles:
    """Return the weighted sum [D] of at most 64 values [S, D] of a head. The largest of the weights [S] is 1."""
    qvalues, scales = quantize_rows(values)
    products = weights * scales
    unit = products.max(initial=np.float32(0)) / MAX_WEIGHT
    factor = np.float32(1) / unit if unit >= 2.0**-126 else np.float32(0)
    sums = np.rint(products * factor + DITHER[: len(weights)]).astype(np.int64) @ qvalues.astype(np.int64)
    result: Singles = sums.astype(np.float32) * unit
    return result
