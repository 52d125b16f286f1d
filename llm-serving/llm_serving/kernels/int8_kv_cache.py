"""Keys and values in 8 bits, in NumPy: what csrc/attending.cc stores, and what csrc/coded_attention.h adds up.

Each head of a token has a scale of its own, its largest magnitude / 127, as a row of w8a8.py has, and so has each head
of a query. A score is the exact sum of products of codes, times the scale of the key, times that of the query. Weights
of 64 tokens, times the scales of their values, are integers of 16 bits, so that their products with codes of values are
added up exactly, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_serving.kernels.w8a8 import Singles, row_codes

Floats = NDArray[np.floating[Any]]
Doubles = NDArray[np.float64]

MOST_WEIGHT = np.float32(65535)
"""What the largest weight of 64 tokens is brought to, times the largest scale of their values."""


def head_codes(x: Floats, num_heads: int) -> tuple[NDArray[np.int8], Singles]:
    """Rows [T, num_heads*D] -> codes [T, num_heads, D] of -127..127 and scales [T, num_heads].

    A head with infinity or NaN has codes of zero and a scale of NaN.
    """
    codes, scales = row_codes(x.reshape(len(x) * num_heads, -1))
    return codes.reshape(len(x), num_heads, -1), scales.reshape(len(x), num_heads)


def restored(x: Floats, num_heads: int) -> Doubles:
    """What attention takes rows [T, num_heads*D] of queries, keys or values for, exactly."""
    codes, scales = head_codes(x, num_heads)
    values: Doubles = codes * scales.astype(np.float64)[..., None]
    return values.reshape(x.shape)


def weighted_sum(weights: Singles, values: Floats) -> Singles:
    """Weights [S] of at most 64 tokens, the largest of which is 1, and their values [S, D] of a head -> [D]."""
    codes, scales = row_codes(values)
    largest = scales.max(initial=np.float32(0))
    relative = scales * (MOST_WEIGHT / largest if largest > 0 else np.float32(0))
    sums = np.rint(weights * relative).astype(np.int64) @ codes.astype(np.int64)
    result: Singles = sums.astype(np.float32) * (largest / MOST_WEIGHT)
    return result
