"""Quantized matrices of 8 and 4 bits in memory, and how a matrix is rounded to them.

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
from llm_serving.formats.stored_tensor import Array, to_float32

ROTATED_BLOCK: Final = 128
"""Number of columns in a block of a rotated matrix, if it divides the columns. Other matrices have smaller blocks."""
SYMMETRIC_ZERO: Final = 8
"""Zero point of 4-bit values without stored zero points: 0..15 stand for -8..7."""

_SAFE_SCALE: Final = 2.0**100
"""Maximum scale with which no dequantized value can be infinite. Only values with larger scales are checked."""
STEPS: Final = (-8.0, -7.5, -8.5, -9.25, -10.0, -11.0)
"""Divisors of the largest element of a group of symmetric 4-bit values, each of which gives a scale to try."""
_LANES: Final = 16
"""Number of partial sums of a group. Column j is added to sum j % 16, as the kernels do."""
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
        if self.scales.size and float(np.abs(self.scales).max()) > _SAFE_SCALE:
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

    @property
    def num_bytes(self) -> int:
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.qvalues.size * self.bits // 8 + self.scales.nbytes + zeros

    def dequantized(self) -> NDArray[np.float32]:
        """Return (qvalue - zero) * scale, [out, in], rounded once. The values of a rotated matrix stay rotated."""
        values = self.qvalues.astype(np.float32)
        group_of = np.arange(values.shape[1], dtype=np.int32) // self.group_size
        group_of = group_of if self.g_idx is None else self.g_idx
        for rows in _blocks(*values.shape):
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


def quantize_w8(weight: Array) -> QuantizedTensor:
    """Quantize each row of a matrix [out, in] to integers from -127 to 127. A row's scale is its largest magnitude /
    127. bfloat16 elements are given as uint16 bits. Raise ModelError if `weight` is no matrix, or has infinity or NaN.
    """
    _check(weight)
    qvalues = np.empty(weight.shape, np.int8)
    scales = np.empty((weight.shape[0], 1), np.float32)
    for rows in _blocks(*weight.shape):
        values = _finite(weight[rows])
        scales[rows] = _usable(np.abs(values).max(axis=1, initial=0, keepdims=True) / np.float32(127))
        qvalues[rows] = np.clip(np.rint(values / scales[rows]), -127, 127)
    return QuantizedTensor(qvalues, scales, None, 8, max(1, weight.shape[1]))


def quantize_w4(weight: Array, group_size: int, symmetric: bool = True) -> QuantizedTensor:
    """Quantize each group of `group_size` columns to 4 bits. `weight` and the raised errors are as in `quantize_w8`.

    Symmetric values are integers from -8 to 7 times a scale. The scale, which may be negative, is the element of
    largest magnitude divided by a number in `STEPS`, chosen for the smallest squared error of the group. With this
    scale, matrix products would be too small, by 0.7 % on average. So the scale is enlarged until the dot product of
    the group and its dequantized values equals the dot product of the group with itself.

    Asymmetric values divide the range from the smallest to the largest element into 15 steps. They represent 0 exactly,
    and their zero points are stored.
    """
    _check(weight)
    out, width = weight.shape
    if group_size < 1 or width % group_size:
        raise ModelError(f"group_size must divide the {width} columns of the matrix. Given: {group_size}")
    qvalues = np.empty((out, width), np.uint8)
    scales = np.empty((out, width // group_size), np.float32)
    zeros = None if symmetric else np.empty(scales.shape, np.uint8)
    for rows in _blocks(out, width):
        values = _finite(weight[rows]).reshape(-1, scales.shape[1], group_size)
        if zeros is None:
            scale, found = _best_symmetric(values)
        else:
            smallest, largest = values.min(axis=2, initial=0), values.max(axis=2, initial=0)
            scale = _usable(largest / np.float32(15) - smallest / np.float32(15))
            zero = np.clip(np.rint(-smallest / scale), 0, 15)
            zeros[rows] = zero
            found = np.clip(np.rint(values / scale[..., None]) + zero[..., None], 0, 15)
        scales[rows] = scale
        qvalues[rows] = found.reshape(-1, width)
    return QuantizedTensor(qvalues, scales, zeros, 4, group_size)


def _best_symmetric(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    smallest, largest = values.min(axis=2, initial=0), values.max(axis=2, initial=0)
    largest = np.where(largest >= -smallest, largest, smallest)
    scale, found, error = _symmetric(values, largest / np.float32(STEPS[0]))
    for step in STEPS[1:]:
        other, values_of_other, error_of_other = _symmetric(values, largest / np.float32(step))
        better = error_of_other < error
        scale, error = np.where(better, other, scale), np.where(better, error_of_other, error)
        found = np.where(better[..., None], values_of_other, found)
    one = np.float32(1)
    numbers: NDArray[np.float32] = values * (one / scale)[..., None]
    squares, products = _sums(numbers * numbers), _sums(numbers * found)
    changes = (products > 0) & (np.abs(scale) < _SAFE_SCALE)
    return scale * (np.where(changes, squares, one) / np.where(changes, products, one)), found + SYMMETRIC_ZERO


def _symmetric(
    values: NDArray[np.float32], scale: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    scale = _usable(scale)
    found = np.clip(np.rint(values * (np.float32(1) / scale)[..., None]), -8, 7)
    with np.errstate(over="ignore"):
        errors = values - found * scale[..., None]
        return scale, found, _sums(errors * errors)


def _sums(terms: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the sum of each group of columns, [rows, groups]. Elements are added in the same order as in kernels."""
    lanes = np.pad(terms, ((0, 0), (0, 0), (0, -terms.shape[2] % _LANES))).reshape(*terms.shape[:2], -1, _LANES)
    sums: NDArray[np.float32] = np.add.accumulate(lanes, axis=2)[:, :, -1]
    while sums.shape[2] > 1:
        sums = sums[..., : sums.shape[2] // 2] + sums[..., sums.shape[2] // 2 :]
    return sums[..., 0]


def _check(weight: Array) -> None:
    if weight.ndim != 2:
        raise ModelError(f"a quantized weight must be a matrix. Given: shape {list(weight.shape)}")


def _finite(weight: Array) -> NDArray[np.float32]:
    values = to_float32(weight)
    if not np.isfinite(values).all():
        raise ModelError("a quantized weight must hold finite numbers only")
    return values


def _usable(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    usable: NDArray[np.float32] = np.where(np.abs(scale) < np.finfo(np.float32).tiny, np.float32(1), scale).astype(
        np.float32
    )
    return usable


def _blocks(rows: int, columns: int) -> list[slice]:
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


def pack_words(qvalues: Uint8Array, bits: int) -> NDArray[np.int32]:
    """Pack values [..., n] into 32-bit words [..., ceil(n / values_per_word(bits))], padded with zeros at the end."""
    missing = -qvalues.shape[-1] % values_per_word(bits)
    if missing:
        qvalues = np.concatenate([qvalues, np.zeros((*qvalues.shape[:-1], missing), np.uint8)], axis=-1)
    packed = qvalues if bits == 8 else qvalues[..., 0::2] | qvalues[..., 1::2] << 4
    return np.ascontiguousarray(packed).view(np.int32)
