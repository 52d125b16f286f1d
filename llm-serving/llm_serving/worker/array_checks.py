"""What is asked of the arrays of every step, each in one pass: they are short, so that the passes are what costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_serving.core.step import Int32Array


def everywhere(mask: NDArray[np.bool_]) -> bool:
    """Whether all of a mask is true; its bytes tell sooner than a reduction."""
    return b"\0" not in mask.tobytes()


def somewhere(mask: NDArray[np.bool_]) -> bool:
    """Whether any of a mask is true."""
    return b"\1" in mask.tobytes()


def are_zero(numbers: NDArray[Any]) -> bool:
    """Whether all bits of all numbers are 0."""
    return not numbers.tobytes().strip(b"\0")


def are_below(values: Int32Array, end: int) -> bool:
    """Whether all lie between 0 and `end` - 1; as unsigned numbers those below 0 are the largest.

    Args:
        values: Of any shape, empty ones included.
        end: From 1 to 2**31.
    """
    return int(np.maximum.reduce(values.view(np.uint32), axis=None, initial=0)) < end


def cut(offsets: Int32Array, num_entries: int, num_parts: int) -> bool:
    """Whether `offsets` [num_parts + 1] begin at 0, never fall and end at `num_entries`."""
    if len(offsets) != num_parts + 1:
        return False
    if not num_entries:
        return are_zero(offsets)
    return offsets.item(0) == 0 and offsets.item(-1) == num_entries and everywhere(offsets[1:] >= offsets[:-1])


def rows_of(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """[len(arrays), n] of arrays [n]."""
    rows: NDArray[Any] = np.concatenate(arrays).reshape(len(arrays), -1)
    return rows
