"""Quantized matrices of 8 and 4 bits in memory.

value = (qvalue - zero) * scale. Each group of columns of a row has a scale. Groups of asymmetric values also have a
zero point. In memory each quantized value takes a byte. Files pack the values into 32-bit words, the first value in the
lowest bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_serving.errors import ModelError
from llm_serving.formats.stored_tensor import Array

ROTATED_BLOCK: Final = 128
"""Number of columns in a block of a rotated matrix, if it divides the columns. Other matrices have smaller blocks."""
SYMMETRIC_ZERO: Final = 8
"""Zero point of 4-bit values without stored zero points: 0..15 stand for -8..7."""

SAFE_SCALE: Final = 2.0**100
"""Maximum scale with which no dequantized value can be infinite. Only values with larger scales are checked."""
_AT_ONCE: Final = 2**22


class QValuesForm(NamedTuple):
    """Layout of quantized values, by which a matmul kernel accepts or refuses them.

    Attributes:
        group_size: Number of columns in a group. 0 means that a row is one group.
        in_order: Whether the columns of each group are adjacent, as they are without GPTQ's act-order.
        has_zeros: Whether 8-bit values have zero points, which kernels refuse. Always False for 4-bit values.
    """

    bits: int
    group_size: int
    in_order: bool = True
    has_zeros: bool = False


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A matrix [out, in] as quantized values and scales. Raise ModelError if a scale or a value is not finite.

    Attributes:
        qvalues: [out, in]; int8 for 8 bits, uint8 from 0 to 15 for 4 bits.
        scales: float32 [out, groups]. If there is only one group, a scale applies to a whole row.
        zeros: Zero points [out, groups], of the dtype of `qvalues`. None means `SYMMETRIC_ZERO`, or 0 for 8 bits.
        g_idx: Group of each column, int32 [in], for GPTQ's act-order. None if column j has group j // group_size.
        rotated: Whether rows were rotated (`kernels/csrc/rotation.h`) and divided by the block size of the
            rotation before they were rounded. Kernels rotate the activations to match.
    """

    qvalues: NDArray[np.int8] | NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: Array | None
    bits: int
    group_size: int
    g_idx: NDArray[np.int32] | None = None
    rotated: bool = False

    def __post_init__(self) -> None:
        assert self.qvalues.ndim == 2
        assert self.qvalues.dtype == {8: np.int8, 4: np.uint8}.get(self.bits)
        assert self.group_size >= 1
        assert self.scales.dtype == np.float32
        assert self.scales.shape == (self.qvalues.shape[0], self.num_groups)
        assert self.zeros is None or (self.zeros.dtype, self.zeros.shape) == (self.qvalues.dtype, self.scales.shape)
        if self.g_idx is not None:
            assert self.g_idx.dtype == np.int32
            assert self.g_idx.shape == self.qvalues.shape[1:]
        check_scales(self.scales)
        if self.scales.size and float(np.abs(self.scales).max()) > SAFE_SCALE:
            with np.errstate(over="ignore"):
                check_values(self.dequantized())

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.qvalues.shape
        return rows, columns

    @property
    def form(self) -> QValuesForm:
        size, has_zeros = 0 if self.num_groups == 1 else self.group_size, self.bits == 8 and self.zeros is not None
        return QValuesForm(self.bits, size, self.g_idx is None, has_zeros)

    def with_groups_of(self, size: int) -> QuantizedTensor:
        times, groups = self.group_size // size, -(-self.qvalues.shape[1] // size)
        zeros = None if self.zeros is None else np.repeat(self.zeros, times, axis=1)[:, :groups]
        return replace(self, scales=np.repeat(self.scales, times, axis=1)[:, :groups], zeros=zeros, group_size=size)

    def with_columns(self, columns: NDArray[np.int64]) -> QuantizedTensor | None:
        """Return these columns of a tensor that has no `g_idx`. Return None if they do not consist of whole groups."""
        size = self.group_size
        if self.num_groups == 1:
            return replace(self, qvalues=self.qvalues[:, columns], group_size=max(1, len(columns)))
        firsts = columns[::size]
        if firsts.min(initial=0) < 0 or not np.array_equal(columns, (firsts[:, None] + np.arange(size)).reshape(-1)):
            return None
        if (firsts % size).any():
            return None
        groups = firsts // size
        zeros = None if self.zeros is None else self.zeros[:, groups]
        return replace(self, qvalues=self.qvalues[:, columns], scales=self.scales[:, groups], zeros=zeros)

    @property
    def num_groups(self) -> int:
        return max(1, -(-self.qvalues.shape[1] // self.group_size))

    def dequantized(self) -> NDArray[np.float32]:
        """Return (qvalue - zero) * scale, [out, in], rounded once. The values of a rotated matrix stay rotated."""
        values = self.qvalues.astype(np.float32)
        group_of = np.arange(values.shape[1], dtype=np.int32) // self.group_size
        group_of = group_of if self.g_idx is None else self.g_idx
        for rows in row_blocks(*values.shape):
            if self.zeros is not None:
                values[rows] -= self.zeros[rows][:, group_of]
            elif self.bits == 4:
                values[rows] -= SYMMETRIC_ZERO
            values[rows] *= self.scales[rows][:, group_of]
        return values


def unrotated(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply each `ROTATED_BLOCK` columns by the Hadamard matrix, which undoes `QuantizedTensor.rotated`."""
    blocks, stride = values.reshape(-1, ROTATED_BLOCK), 1
    while stride < ROTATED_BLOCK:
        pairs = blocks.reshape(-1, 2, stride)
        blocks = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        stride *= 2
    return blocks.reshape(values.shape)


def check_scales(scales: NDArray[np.float32]) -> None:
    finite = np.isfinite(scales)
    if not finite.all():
        raise ModelError(f"scales must be finite numbers. Found: {scales[~finite][0]}")


def check_values(values: NDArray[np.float32]) -> None:
    ends = values.min(initial=0), values.max(initial=0)  # NaN if any value is NaN
    if infinite := [each for each in ends if not np.isfinite(each)]:
        raise ModelError(f"quantized values and scales must give finite numbers. Found: {infinite[0]}")


def group_of_columns(given: Array, group_size: int, groups: int) -> Array | None:
    """Return each column's group, or None if it is j // group_size for column j. Raise ModelError for a wrong group."""
    columns = np.array(given, np.int32)
    if columns.size and not 0 <= int(columns.min()) <= int(columns.max()) < groups:
        found = f"{columns.min()} to {columns.max()}"
        raise ModelError(f"g_idx must have groups from 0 to {groups - 1}. Found: {found}")
    return None if np.array_equal(columns, np.arange(len(columns)) // group_size) else columns


def from_unsigned(
    qvalues: NDArray[np.uint8],
    scales: Array,
    zeros: NDArray[np.uint8] | None,
    bits: int,
    group_size: int,
    columns: Array | None,
) -> QuantizedTensor:
    """Return a tensor of unsigned qvalues [out, in]. `zeros` None: the middle value stands for 0. `columns`: g_idx."""
    if zeros is not None and (zeros == 2 ** (bits - 1)).all():
        zeros = None
    if bits == 4:
        return QuantizedTensor(qvalues, scales, zeros, 4, group_size, columns)
    signed_zeros = None if zeros is None else _signed(zeros)
    return QuantizedTensor(_signed(qvalues), scales, signed_zeros, 8, group_size, columns)


def _signed(values: NDArray[np.uint8]) -> NDArray[np.int8]:
    return (values ^ np.uint8(128)).view(np.int8)


def row_blocks(rows: int, columns: int) -> list[slice]:
    step = max(1, _AT_ONCE // max(1, columns))
    return [slice(start, start + step) for start in range(0, rows, step)]


Uint8Array = NDArray[np.uint8]


def values_per_word(bits: int) -> int:
    return 32 // bits


def unpack_words(words: NDArray[Any], bits: int) -> Uint8Array:
    """Unpack 32-bit words [..., n] to values [..., n * values_per_word(bits)]."""
    return unpack_bytes(np.ascontiguousarray(words).view(np.uint8), bits)


def unpack_bytes(packed: Uint8Array, bits: int) -> Uint8Array:
    """Unpack bytes [..., n] to values [..., n * 8 // bits], the low bits of a byte first."""
    if bits == 8:
        return packed
    qvalues = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 15, out=qvalues[..., 0::2])
    np.right_shift(packed, 4, out=qvalues[..., 1::2])
    return qvalues
