"""Keys and values in 8 bits, in NumPy: what csrc/attending.cc stores, bit by bit.

Each head of a token has a scale of its own, its largest magnitude / 127, as a row of w8a8.py has. Codes are exact in
every model dtype, so that attention multiplies by them as they are: scores take the scales of keys with them, weights
those of values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_serving.kernels.w8a8 import Singles, row_codes

Floats = NDArray[np.floating[Any]]
Doubles = NDArray[np.float64]


def head_codes(x: Floats, num_heads: int) -> tuple[NDArray[np.int8], Singles]:
    """Rows [T, num_heads*D] -> codes [T, num_heads, D] of -127..127 and scales [T, num_heads].

    A head with infinity or NaN has codes of zero and a scale of NaN.
    """
    codes, scales = row_codes(x.reshape(len(x) * num_heads, -1))
    return codes.reshape(len(x), num_heads, -1), scales.reshape(len(x), num_heads)


def restored(x: Floats, num_heads: int) -> Doubles:
    """What attention takes rows [T, num_heads*D] for, exactly."""
    codes, scales = head_codes(x, num_heads)
    values: Doubles = codes * scales.astype(np.float64)[..., None]
    return values.reshape(x.shape)
