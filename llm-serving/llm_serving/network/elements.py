"""The types a model is computed in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from llm_serving.core.dtypes import MODEL_DTYPES

ELEMENT_BYTES: Final[Mapping[str, int]] = {dtype.name: dtype.num_bytes for dtype in MODEL_DTYPES.values()}


def rounded_to(value: np.float32, dtype: str) -> np.float32:
    """The nearest number of a model dtype, ties to even; finite numbers only."""
    if dtype == "float16":
        return np.float32(np.float16(value))
    if dtype == "float32":
        return value
    bits = value.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    kept = (bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)
    return kept.view(np.float32)
