"""From the tensors of a model folder to the parameters of a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llm_serving.formats.stored_tensor import to_float32
from llm_serving.network.operations import Weight

Array = NDArray[Any]
"""float32, float16, or bfloat16 carried as uint16 bits."""


class Tensors(Protocol):
    """Where tensors come from."""

    def take(self, name: str, shape: tuple[int, ...]) -> Array:
        """The tensor of a name, which must have this shape; it may be a read-only memory map."""


def parameter(weight: Weight, tensors: Tensors, num_positions: int) -> Array:
    """What a weight is to hold.

    Args:
        weight: Of a description.
        tensors: Of the model.
        num_positions: Longest context that is served.

    Returns:
        A C-contiguous array of `weight.shape` (the rows of a table that is made are `num_positions`), in a type it was
        stored in or float32; perhaps a read-only memory map.
    """
    if weight.made is not None:
        return weight.made(num_positions)
    return made_of(weight, [tensors.take(name, shape) for name, shape in zip(weight.names, weight.stored, strict=True)])


def made_of(weight: Weight, parts: Sequence[Array]) -> Array:
    """The same from its tensors."""
    if len({part.dtype for part in parts}) > 1 or (weight.change is not None and parts[0].dtype != np.float32):
        parts = [to_float32(part) for part in parts]
    if weight.rows is not None:
        stack = _picked_of_stack(parts, weight.rows)
    else:
        stack = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if weight.columns is not None:
        stack = _picked(stack.T, weight.columns).T
    if weight.change is not None:
        stack = weight.change(stack)
    whole: Array = np.ascontiguousarray(stack.reshape(weight.shape))
    return whole


def _picked_of_stack(parts: Sequence[Array], order: Sequence[int]) -> Array:
    """Rows of a stack in another order; of a memory map those that are not picked are not read."""
    if len(parts) == 1:
        return _picked(parts[0], order)
    at = np.array(order)
    rows: Array = np.zeros((len(at), *parts[0].shape[1:]), parts[0].dtype)
    first = 0
    for part in parts:
        of_part = (at >= first) & (at < first + len(part))
        rows[of_part] = part[at[of_part] - first]
        first += len(part)
    return rows


def _picked(array: Array, order: Sequence[int]) -> Array:
    """Rows of an array in another order; -1 is a row of zeros."""
    at = np.array(order)
    rows: Array = array[np.maximum(at, 0)]
    rows[at < 0] = 0
    return rows
