"""Assembles the parameters of a network from the tensors of a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llm_serving.formats.stored_tensor import to_float32
from llm_serving.network.operations import Weight

Array = NDArray[Any]
"""float32, float16, or bfloat16 as uint16 bits."""


class Tensors(Protocol):
    def read(self, name: str, shape: tuple[int, ...]) -> Array:
        """Return a tensor of this shape, possibly as a read-only memory map."""


def load_parameter(weight: Weight, tensors: Tensors, num_positions: int) -> Array:
    """Return a weight as a C-contiguous array of `weight.shape`, of a stored type or float32; possibly a read-only
    memory map. Generated tables have `num_positions` rows (the longest served context).
    """
    if weight.generate is not None:
        return weight.generate(num_positions)
    return assemble_weight(
        weight, [tensors.read(name, shape) for name, shape in zip(weight.names, weight.stored_shapes, strict=True)]
    )


def assemble_weight(weight: Weight, parts: Sequence[Array]) -> Array:
    """Assemble a weight from its tensors. Matrices that a tensor stacks follow one another."""
    parts = [np.swapaxes(part, -1, -2) for part in parts] if weight.transposed else parts
    is_vector = len(weight.shape) == 1
    parts = [part.reshape(-1) if is_vector else part.reshape(-1, part.shape[-1]) for part in parts]
    if len({part.dtype for part in parts}) > 1 or (weight.transform is not None and parts[0].dtype != np.float32):
        parts = [to_float32(part) for part in parts]
    if weight.rows is not None:
        stack = _picked_of_stack(parts, weight.rows)
    else:
        stack = parts[0] if len(parts) == 1 else np.concatenate(parts)
    stack = picked(stack.T, weight.columns).T
    if weight.transform is not None:
        stack = weight.transform(stack)
    whole: Array = np.ascontiguousarray(stack.reshape(weight.shape))
    return whole


def _picked_of_stack(parts: Sequence[Array], order: Sequence[int]) -> Array:
    if len(parts) == 1:
        return picked(parts[0], order)
    at = np.array(order)
    rows: Array = np.zeros((len(at), *parts[0].shape[1:]), parts[0].dtype)
    first = 0
    for part in parts:
        of_part = (at >= first) & (at < first + len(part))
        rows[of_part] = part[at[of_part] - first]
        first += len(part)
    return rows


def picked(array: Array, order: Sequence[int] | None) -> Array:
    """Return the rows of an array in an order as `Weight.rows` states it."""
    if order is None:
        return array
    at = np.array(order)
    rows: Array = array[np.maximum(at, 0)]
    rows[at < 0] = 0
    return rows
