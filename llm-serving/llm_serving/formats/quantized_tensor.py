"""Weights of 8 and 4 bits: codes, and the scales that make numbers of them; how a matrix is rounded to them.

value = (code - zero) * scale, where each row and group of columns has a scale, and a zero where values are not
symmetric. What packs codes into words is the business of each form of file; here they lie one in a byte.

Codes of 4 and 8 bits in words of 32, the lowest bits first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_serving.errors import ModelError
from llm_serving.formats.stored_tensor import Array, to_float32

SYMMETRIC_ZERO: Final = 8
"""Code of 0 in 4 bits where no zeros are told: codes 0..15 stand for -8..7."""

_SAFE_SCALE: Final = 2.0**100
"""No code makes an infinite number of a scale below."""
_AT_ONCE: Final = 2**22
"""Elements that are rounded together; more would hold float32 copies of a large matrix."""


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A matrix [out, in] as codes and scales.

    Attributes:
        codes: [out, in]; int8 of 8 bits, uint8 0..15 of 4 bits.
        scales: [out, groups], float32; one group is a scale for a whole row.
        zeros: [out, groups], uint8, of 4 bits alone: the code of 0. None: `SYMMETRIC_ZERO` in 4 bits, 0 in 8 bits.
        bits: 8 or 4.
        group_size: Columns of a group; the number of columns where a row is one group.
        columns: [in], int32: column j belongs to group columns[j] (GPTQ's act-order). None: to j // group_size.

    Raises:
        ModelError: The arrays do not fit each other.
    """

    codes: NDArray[np.int8] | NDArray[np.uint8]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8] | None
    bits: int
    group_size: int
    columns: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        kinds = {8: np.dtype(np.int8), 4: np.dtype(np.uint8)}
        if self.codes.ndim != 2 or kinds.get(self.bits) != self.codes.dtype:
            raise ModelError(f"codes must be [out, in] of 8 bits (int8) or 4 (uint8). Given: {self._told()}")
        if self.group_size < 1 or self.scales.shape != (self.codes.shape[0], self.num_groups):
            raise ModelError(f"scales must be [out, groups] for {self._told()}. Given: {list(self.scales.shape)}")
        if self.scales.dtype != np.float32:
            raise ModelError(f"scales must be float32. Given: {self.scales.dtype}")
        check_scales(self.scales)
        if self.zeros is not None and (
            self.bits != 4 or self.zeros.dtype != np.uint8 or self.zeros.shape != self.scales.shape
        ):
            raise ModelError(f"zeros must be uint8, of 4 bits and of the shape of scales, for {self._told()}")
        if self.columns is not None and not self._columns_fit(self.columns):
            raise ModelError(f"columns must be int32 [in], each a group, for {self._told()}")
        if self.scales.size and float(np.abs(self.scales).max()) > _SAFE_SCALE:
            with np.errstate(over="ignore"):
                check_values(self.dequantized())

    def _columns_fit(self, columns: NDArray[np.int32]) -> bool:
        fits = columns.dtype == np.int32 and columns.shape == (self.codes.shape[1],)
        return fits and (not columns.size or 0 <= int(columns.min()) <= int(columns.max()) < self.num_groups)

    def _told(self) -> str:
        return f"{list(self.codes.shape)} {self.codes.dtype}, {self.bits} bits, groups of {self.group_size}"

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def num_groups(self) -> int:
        """Of a row; the last may be shorter."""
        return max(1, -(-self.codes.shape[1] // self.group_size))

    @property
    def num_bytes(self) -> int:
        """As served: two codes of 4 bits in a byte, scales and zeros as they are."""
        zeros = 0 if self.zeros is None else self.zeros.nbytes
        return self.codes.size * self.bits // 8 + self.scales.nbytes + zeros

    def dequantized(self) -> NDArray[np.float32]:
        """(code - zero) * scale, [out, in]: the difference is exact, the product rounded once."""
        values = self.codes.astype(np.float32)
        group_of = np.arange(values.shape[1], dtype=np.int32) // self.group_size
        group_of = group_of if self.columns is None else self.columns
        for rows in _blocks(*values.shape):
            if self.zeros is not None:
                values[rows] -= self.zeros[rows][:, group_of]
            elif self.bits == 4:
                values[rows] -= SYMMETRIC_ZERO
            values[rows] *= self.scales[rows][:, group_of]
        return values


def check_scales(scales: NDArray[np.float32]) -> None:
    """Raises:
    ModelError: One is infinite or no number, and so would be what it makes of codes.
    """
    finite = np.isfinite(scales)
    if not finite.all():
        raise ModelError(f"scales must be finite numbers. Found: {scales[~finite][0]}")


def check_values(values: NDArray[np.float32]) -> None:
    """Raises:
    ModelError: What codes and scales make is infinite or no number.
    """
    ends = values.min(initial=0), values.max(initial=0)  # no number is both
    if infinite := [each for each in ends if not np.isfinite(each)]:
        raise ModelError(f"codes and scales must make finite numbers. Found: {infinite[0]}")


def group_of_columns(given: Array, group_size: int, groups: int) -> Array | None:
    """Group of each column; None where columns are in order.

    Raises:
        ModelError: One is no group.
    """
    columns = np.array(given, np.int32)
    if columns.size and not 0 <= int(columns.min()) <= int(columns.max()) < groups:
        raise ModelError(f"g_idx must be groups from 0 to {groups - 1}")
    return None if np.array_equal(columns, np.arange(len(columns)) // group_size) else columns


def of_unsigned(
    codes: NDArray[np.uint8],
    scales: Array,
    zeros: NDArray[np.uint8] | None,
    bits: int,
    group_size: int,
    columns: Array | None,
) -> QuantizedTensor | Array:
    """A tensor of unsigned codes; the values themselves of 8 bits whose zeros lie elsewhere than in the middle.

    Args:
        codes: [out, in]
        scales: [out, groups], float32.
        zeros: [out, groups]; None: the middle.
        bits, group_size, columns: As of `QuantizedTensor`.
    """
    if bits == 4:
        if zeros is not None and (zeros == SYMMETRIC_ZERO).all():
            zeros = None
        return QuantizedTensor(codes, scales, zeros, 4, group_size, columns)
    if zeros is None or (zeros == 128).all():
        return QuantizedTensor((codes ^ np.uint8(128)).view(np.int8), scales, None, 8, group_size, columns)
    check_scales(scales)
    group_of = np.arange(codes.shape[1]) // group_size if columns is None else columns
    values: Array = codes.astype(np.float32)
    values -= zeros[:, group_of]
    with np.errstate(over="ignore"):
        values *= scales[:, group_of]
    check_values(values)
    return values


def quantize_w8(weight: Array) -> QuantizedTensor:
    """Rounds each row to 8 bits: codes -127..127, and the scale that its largest element asks for.

    Args:
        weight: [out, in]; float32, float16, or bfloat16 as uint16 bits.

    Raises:
        ModelError: It is no matrix, or an element is infinite or no number.
    """
    _check(weight)
    codes = np.empty(weight.shape, np.int8)
    scales = np.empty((weight.shape[0], 1), np.float32)
    for rows in _blocks(*weight.shape):
        values = _finite(weight[rows])
        scales[rows] = _usable(np.abs(values).max(axis=1, initial=0, keepdims=True) / np.float32(127))
        codes[rows] = np.clip(np.rint(values / scales[rows]), -127, 127)
    return QuantizedTensor(codes, scales, None, 8, max(1, weight.shape[1]))


def quantize_w4(weight: Array, group_size: int, symmetric: bool = True) -> QuantizedTensor:
    """Rounds each group of columns to 4 bits.

    Symmetric codes reach from -8 to 7 scales, the largest element lying at 7.5; the others reach from the smallest to
    the largest element in 15 scales, 0 being one of the codes.

    Args:
        weight: As of `quantize_w8`.
        group_size: Columns of a group; divides those of the matrix.
        symmetric: Whether 0 has the same code everywhere, which needs no zeros.

    Raises:
        ModelError: As `quantize_w8`, or the groups do not fit.
    """
    _check(weight)
    out, width = weight.shape
    if group_size < 1 or width % group_size:
        raise ModelError(f"group_size must divide the {width} columns of the matrix. Given: {group_size}")
    codes = np.empty((out, width), np.uint8)
    scales = np.empty((out, width // group_size), np.float32)
    zeros = None if symmetric else np.empty(scales.shape, np.uint8)
    for rows in _blocks(out, width):
        values = _finite(weight[rows]).reshape(-1, scales.shape[1], group_size)
        if zeros is None:
            scale = _usable(np.abs(values).max(axis=2, initial=0) / np.float32(7.5))
            zero = np.full(scale.shape, SYMMETRIC_ZERO, np.float32)
        else:
            least, most = values.min(axis=2, initial=0), values.max(axis=2, initial=0)
            scale = _usable(most / np.float32(15) - least / np.float32(15))
            zero = np.clip(np.rint(-least / scale), 0, 15)
            zeros[rows] = zero
        scales[rows] = scale
        found = np.clip(np.rint(values / scale[..., None]) + zero[..., None], 0, 15)
        codes[rows] = found.reshape(-1, width)
    return QuantizedTensor(codes, scales, zeros, 4, group_size)


def _check(weight: Array) -> None:
    if weight.ndim != 2:
        raise ModelError(f"what is quantised must be a matrix. Given: shape {list(weight.shape)}")


def _finite(weight: Array) -> NDArray[np.float32]:
    values = to_float32(weight)
    if not np.isfinite(values).all():
        raise ModelError("what is quantised must hold finite numbers only")
    return values


def _usable(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 where all elements are 0, or so small that their scale is below the smallest normal number."""
    usable: NDArray[np.float32] = np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale).astype(np.float32)
    return usable


def _blocks(rows: int, columns: int) -> list[slice]:
    """Rows that are computed together."""
    step = max(1, _AT_ONCE // max(1, columns))
    return [slice(start, start + step) for start in range(0, rows, step)]


Uint8Array = NDArray[np.uint8]


def per_word(bits: int) -> int:
    """Codes in a word."""
    return 32 // bits


def codes_of_words(words: NDArray[Any], bits: int) -> Uint8Array:
    """[..., n] words of 32 bits -> [..., n * per_word(bits)] codes."""
    return codes_of_bytes(np.ascontiguousarray(words).view(np.uint8), bits)


def codes_of_bytes(packed: Uint8Array, bits: int) -> Uint8Array:
    """[..., n] bytes -> [..., n * 8 // bits] codes, the low half of a byte first."""
    if bits == 8:
        return packed
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0::2])
    np.right_shift(packed, 4, out=codes[..., 1::2])
    return codes


def words_of_codes(codes: Uint8Array, bits: int) -> NDArray[np.int32]:
    """The way back: [..., n] codes -> [..., ceil(n / per_word(bits))] words, the last filled up with zeros."""
    missing = -codes.shape[-1] % per_word(bits)
    if missing:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], missing), np.uint8)], axis=-1)
    packed = codes if bits == 8 else codes[..., 0::2] | codes[..., 1::2] << 4
    return np.ascontiguousarray(packed).view(np.int32)
