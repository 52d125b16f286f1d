"""bfloat16 in NumPy, which has no such dtype: its bits are carried as uint16."""

import numpy as np
from numpy.typing import NDArray


def round_to_bfloat16(array: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even; NaN stays NaN, overflow becomes infinity."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x0040
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, quiet_nan, rounded).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 values of bfloat16 bits, exactly."""
    return (np.asarray(bits, dtype=np.uint32) << 16).view(np.float32)
