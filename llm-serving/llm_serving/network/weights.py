"""How weights are made from the tensors of a model folder: row and column orders, factors, constants, and assembly.

An order selects rows or columns: entry i is the tensor's row or column that becomes number i, and -1 means zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_serving.formats.stored_tensor import to_float32
from llm_serving.network.operations import Float32Array, Transform, Weight


def padded_order(unpadded: int, multiple: int) -> list[int]:
    """Return the order 0, 1, ..., unpadded - 1, then -1 up to a multiple of `multiple`."""
    return [i if i < unpadded else -1 for i in range(-(-unpadded // multiple) * multiple)]


def repeated_order(count: int, size: int, order: Sequence[int]) -> list[int]:
    """Repeat an order in each of `count` consecutive blocks of `size` elements."""
    return [-1 if i < 0 else block * size + i for block in range(count) for i in order]


def parts_order(start: int, groups: int, widths: Sequence[int]) -> list[int]:
    """Return the order with part 0 of all groups, then part 1, ... `start`: first index. `widths`: parts of a group."""
    elements = np.arange(start, start + groups * sum(widths)).reshape(groups, -1)
    parts = np.split(elements, np.cumsum(widths)[:-1], axis=1)
    return [each for part in parts for each in part.reshape(-1).tolist()]


def order_of(numbers: Sequence[int] | None, size: int) -> tuple[int, ...] | None:
    """Return row or column numbers in the form of `Weight.rows`, or None if they are 0, 1, ..., `size` - 1."""
    order = None if numbers is None else shared_order(tuple(numbers))
    return None if order is None or _is_unchanged(order, size) else order


@lru_cache(64)
def _is_unchanged(order: tuple[int, ...], size: int) -> bool:
    return order == tuple(range(size))


@lru_cache(64)
def shared_order(order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the same tuple object for all equal orders, which saves memory for layers of the same shape."""
    return order


Array = NDArray[Any]
"""float32, float16, or bfloat16 as uint16 bits."""


@dataclass(frozen=True)
class RowStack:
    """A weight whose rows are rows of stored C-contiguous matrices (`parts`), so that it can be packed without a copy.
    Row i is row order[i] of the stacked parts; -1 is a row of zeros. Without `order`, all rows keep their order.
    """

    parts: Sequence[Array]
    order: Sequence[int] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, int]:
        rows = sum(len(part) for part in self.parts) if self.order is None else len(self.order)
        return rows, self.parts[0].shape[1]

    def addresses(self) -> tuple[NDArray[np.uint64], Array]:
        """Return the address of each row, and a row of zeros that the caller must keep while it uses the addresses."""
        stride = self.parts[0].strides[0]
        starts = [part.ctypes.data + np.arange(len(part), dtype=np.uint64) * np.uint64(stride) for part in self.parts]
        zeros = np.zeros(self.shape[1], self.dtype)
        stacked = np.concatenate([*starts, np.array([zeros.ctypes.data], np.uint64)])
        return stacked[:-1] if self.order is None else stacked[np.array(self.order)], zeros

    def assembled(self) -> Array:
        if self.order is not None:
            return _picked_of_stack(self.parts, self.order)
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)


def row_stack(weight: Weight, parts: Sequence[Array]) -> RowStack | Array:
    """Return the weight as rows of its stored tensors, without a copy. Assemble the weight if tensors need a change."""
    is_direct = not (weight.transposed or weight.columns or weight.transform) and len(weight.shape) == 2
    if not is_direct or len({part.dtype for part in parts}) > 1 or not all(part.flags.c_contiguous for part in parts):
        return assemble_weight(weight, parts)
    return RowStack([part.reshape(-1, part.shape[-1]) for part in parts], weight.rows)


def assemble_weight(weight: Weight, parts: Sequence[Array]) -> Array:
    """Assemble a weight from its tensors. A tensor with several matrices counts as one matrix with all their rows."""
    parts = [np.swapaxes(part, -1, -2) for part in parts] if weight.transposed else parts
    is_vector = len(weight.shape) == 1
    parts = [part.reshape(-1) if is_vector else part.reshape(-1, part.shape[-1]) for part in parts]
    if len({part.dtype for part in parts}) > 1 or (weight.transform is not None and parts[0].dtype != np.float32):
        parts = [to_float32(part) for part in parts]
    stack = RowStack(parts, weight.rows).assembled()
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
    if order is None:
        return array
    at = np.array(order)
    rows: Array = array[np.maximum(at, 0)]
    rows[at < 0] = 0
    return rows


@dataclass(frozen=True)
class Constant:
    size: int
    value: float

    def __call__(self, _: int) -> Float32Array:
        return np.full(self.size, self.value, np.float32)


@dataclass(frozen=True)
class PaddedMeanScale:
    """Multiplies a norm weight by sqrt(share of unpadded columns), because zero padding lowers a row's mean square."""

    share: float
    transform: Transform | None

    def __call__(self, gamma: Float32Array) -> Float32Array:
        changed = gamma if self.transform is None else self.transform(gamma)
        return changed * np.float32(math.sqrt(self.share))


@dataclass(frozen=True)
class Scaled:
    factor: float

    def __call__(self, weight: Float32Array) -> Float32Array:
        return weight * np.float32(self.factor)


@dataclass(frozen=True)
class RowFactors:
    """A `Weight.transform` that multiplies consecutive runs of rows by factors. `parts`: (number of rows, factor)."""

    parts: tuple[tuple[int, float], ...]
    rows: tuple[int, ...] | None = None

    def __call__(self, weight: Float32Array) -> Float32Array:
        counts, factors = zip(*self.parts, strict=True)
        of_rows = np.repeat(np.array(factors, np.float32), counts)[
            slice(None) if self.rows is None else list(self.rows)
        ]
        scaled: Float32Array = weight * of_rows[:, None]
        return scaled

    def of_rows(self, rows: tuple[int, ...]) -> RowFactors:
        return replace(self, rows=rows if self.rows is None else tuple(self.rows[row] for row in rows))


def with_rows(weight: Weight, order: tuple[int, ...]) -> Weight:
    """Return the weight with the rows that `order` selects, in this order. -1 is a row of zeros."""
    transform = weight.transform
    if isinstance(transform, RowFactors):
        transform = transform.of_rows(order)
    return replace(
        weight, shape=(len(order), *weight.shape[1:]), rows=_composed(weight.rows, order), transform=transform
    )


def with_columns(weight: Weight, order: tuple[int, ...]) -> Weight:
    """Return the weight with the columns that `order` selects, in this order. -1 is a column of zeros."""
    return replace(weight, shape=(weight.shape[0], len(order)), columns=_composed(weight.columns, order))


@lru_cache(64)
def _composed(first: tuple[int, ...] | None, second: tuple[int, ...]) -> tuple[int, ...]:
    """Return the one order that is equivalent to selecting by `first`, and then by `second` from the result."""
    return second if first is None else tuple(-1 if number < 0 else first[number] for number in second)


@dataclass(frozen=True)
class PositionEmbedding:
    """A learned embedding of positions, to which an embedding of token types is added. `name`: tensor name prefix of
    the position table [first + num_positions, H], whose row `first` is position 0. `types`: tensor name prefix of the
    type table [num_types, H].
    """

    name: str
    types: str
    num_positions: int
    num_types: int
    first: int = 0

    def table(self, hidden: int) -> Weight:
        """Return the sums of both embeddings, [num_types * num_positions, H]: the first type's positions come first."""
        stored = (self.first + self.num_positions, hidden), (self.num_types, hidden)
        shape = (self.num_types * self.num_positions, hidden)
        return Weight((f"{self.name}.weight", f"{self.types}.weight"), shape, stored, transform=self.sums)

    def sums(self, stack: Float32Array) -> Float32Array:
        positions, types = stack[self.first : -self.num_types], stack[-self.num_types :]
        return np.concatenate([positions + each for each in types])
