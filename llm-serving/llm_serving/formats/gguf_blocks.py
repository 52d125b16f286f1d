"""The quantized block types of GGUF, read in NumPy (layouts: ggml-common.h of ggml).

    type     elements    parts of a block, in bytes                                                 value
    Q4_0     32          d f16, 16 nibbles: low ones are elements 0-15, high ones 16-31             (q - 8) d
    Q4_1     32          d f16, m f16, 16 nibbles                                                   q d + m
    Q5_0     32          d f16, fifth bits u32, 16 nibbles                                          (q - 16) d
    Q5_1     32          d f16, m f16, fifth bits u32, 16 nibbles                                   q d + m
    Q8_0     32          d f16, 32 int8                                                             q d
    IQ4_NL   32          d f16, 16 nibbles                                                          table[q] d
    MXFP4    32          e u8, 16 nibbles                                                           table[q] 2^(e - 127)
    Q2_K     256         16 scales (low) and minima (high nibbles), 64 bit pairs, d f16, m f16      q d s - m n
    Q3_K     256         32 third bits, 64 bit pairs, 12 scales, d f16                              (q - 4) d (s - 32)
    Q4_K     256         d f16, m f16, 12 scales and minima, 128 nibbles                            q d s - m n
    Q5_K     256         d f16, m f16, 12 scales and minima, 32 fifth bits, 128 nibbles             q d s - m n
    Q6_K     256         128 nibbles, 64 upper bits, 16 int8 scales, d f16                          (q - 32) d s
    IQ4_XS   256         d f16, scales: 2 upper bits and 4 nibbles, 128 nibbles                     table[q] d (s - 32)

Parts are in file order. The number before a part is its size in bytes: "16 nibbles" are 16 bytes with two 4-bit values
each. d, m and e belong to the whole block. q is the quantized value of an element, and `table` has the sixteen values
that q stands for. s and n are the scale and minimum of the element's group. A group has 16 elements in Q2_K, Q3_K and
Q6_K, otherwise 32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llm_serving.errors import ModelError
from llm_serving.formats.block_tensor import PANEL_ROWS, UNIT_COLUMNS, BlockTensor
from llm_serving.formats.small_floats import TWICE
from llm_serving.formats.stored_tensor import Array

Uint8Array = NDArray[np.uint8]

BLOCKS_PART: Final = "blocks"
"""Name of the array with the blocks, [rows, bytes of a row], in a `PackedTensor`."""
_AT_ONCE: Final = 2**24
_LINE: Final = 64


class _Numbers(NamedTuple):
    """The unpacked numbers of n blocks: quantized values [n, elements], and a scale and a minimum of each group, [n,
    groups]. Integer scales and minima are multiplied by `units` and `minimum_units`, [n, 1].
    """

    qvalues: Uint8Array
    scales: NDArray[Any]
    minima: NDArray[Any] | None = None
    units: NDArray[np.float16] | None = None
    minimum_units: NDArray[np.float16] | None = None


@dataclass(frozen=True)
class BlockType:
    """A block type of GGUF. `unpack`: function from bytes [n, num_bytes] to numbers. `group`: elements per scale."""

    name: str
    elements: int
    num_bytes: int
    unpack: Callable[[Uint8Array], _Numbers]
    bits: int
    zero: int = 0
    group: int = 32
    has_minima: bool = False

    @property
    def has_units(self) -> bool:
        return self.elements == UNIT_COLUMNS

    def packed_bytes(self, shape: tuple[int, ...]) -> int:
        """Return how many bytes matrices of this shape take after packing for the kernels, with all padding."""
        out, width = shape[-2:]
        numbers = PANEL_ROWS * (2 if self.has_minima else 1)
        group = PANEL_ROWS * self.group * self.bits // 8 + numbers * (1 if self.has_units else 2)

        def chunk(columns: int) -> int:
            return -(-(columns // self.group * group + (2 * numbers if self.has_units else 0)) // _LINE) * _LINE

        rest = width % UNIT_COLUMNS
        panel = width // UNIT_COLUMNS * chunk(UNIT_COLUMNS) + (chunk(rest) if rest else 0)
        return math.prod(shape[:-2]) * -(-out // PANEL_ROWS) * panel

    def __call__(self, arrays: Mapping[str, Array]) -> BlockTensor:
        """Unpack the array BLOCKS_PART. A `PackedTensor` calls this as its `unpack`."""
        return self.unpacked(arrays[BLOCKS_PART])

    def unpacked(self, rows: Array) -> BlockTensor:
        """Unpack a matrix from the bytes of its rows, [out, bytes of a row]."""
        out, row_blocks = len(rows), rows.shape[1] // self.num_bytes
        step = max(1, _AT_ONCE // max(1, row_blocks * self.elements))
        parts = [self._numbers(np.asarray(rows[start : start + step])) for start in range(0, max(out, 1), step)]
        qvalues, scales, *others = (
            None if each[0] is None else np.concatenate(each) for each in zip(*parts, strict=True)
        )
        assert qvalues is not None and scales is not None
        return BlockTensor(qvalues, self.bits, self.group, self.zero, scales, *others)

    def _numbers(self, rows: Uint8Array) -> list[NDArray[Any] | None]:
        found = self.unpack(np.ascontiguousarray(rows).reshape(-1, self.num_bytes))
        row_blocks = rows.shape[1] // self.num_bytes
        return [None if each is None else each.reshape(len(rows), row_blocks * each.shape[1]) for each in found]


def _halves(blocks: Uint8Array, start: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16)


def _low_then_high(packed: Uint8Array) -> Uint8Array:
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _flat(qvalues: Uint8Array) -> Uint8Array:
    return qvalues.reshape(len(qvalues), -1)


def _after_halves(
    qvalues: Callable[[Uint8Array], Uint8Array], *, has_minima: bool = False
) -> Callable[[Uint8Array], _Numbers]:
    """Return a function that unpacks blocks of a float16 scale, perhaps a float16 minimum, and then quantized values.
    `qvalues`: function from the bytes of the quantized values to these values.
    """

    def unpack(blocks: Uint8Array) -> _Numbers:
        if has_minima:
            return _Numbers(qvalues(blocks[:, 4:]), _halves(blocks, 0), -_halves(blocks, 2))
        return _Numbers(qvalues(blocks[:, 2:]), _halves(blocks, 0))

    return unpack


def _five_bits(blocks: Uint8Array) -> Uint8Array:
    """Unpack bytes [n, 20] to 5-bit values [n, 32]. The fifth bits of all values precede the low four bits."""
    fifth = np.unpackbits(blocks[:, :4], axis=1, bitorder="little")
    return _low_then_high(blocks[:, 4:]) | fifth << np.uint8(4)


def _pairs_of_bits(packed: Uint8Array) -> Uint8Array:
    """Unpack bytes [n, 64] to 2-bit values [n, 2, 4, 32]. Each 32 bytes hold four runs of 32 elements: byte i has
    element i of each run, the first run in the lowest bits.
    """
    return packed.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)


def _q2_k(blocks: Uint8Array) -> _Numbers:
    scales = (blocks[:, :16] & 15).view(np.int8)
    return _Numbers(
        _flat(_pairs_of_bits(blocks[:, 16:80])), scales, blocks[:, :16] >> 4, _halves(blocks, 80), _halves(blocks, 82)
    )


def _q3_k(blocks: Uint8Array) -> _Numbers:
    third = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    qvalues = _pairs_of_bits(blocks[:, 32:96]).reshape(-1, 8, 32) | third << np.uint8(2)
    low = _low_then_high(blocks[:, 96:104])  # the low four bits of 16 scales
    upper = blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)
    scales = (low | _flat(upper) << np.uint8(4)).view(np.int8) - np.int8(32)
    return _Numbers(_flat(qvalues), scales, None, _halves(blocks, 108))


def _scales_and_minima(packed: Uint8Array) -> tuple[NDArray[np.int8], Uint8Array]:
    """Unpack bytes [n, 12] to 6-bit scales and minima, [n, 8] each. Each of the last four is split over two bytes."""
    first, second, both = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, both & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, both >> 4 | second >> 6 << 4], axis=1)
    return scales.view(np.int8), minima


def _q4_k(blocks: Uint8Array) -> _Numbers:
    qvalues = _flat(_low_then_high(blocks[:, 16:].reshape(-1, 4, 32)))
    return _Numbers(qvalues, *_scales_and_minima(blocks[:, 4:16]), _halves(blocks, 0), _halves(blocks, 2))


def _q5_k(blocks: Uint8Array) -> _Numbers:
    qvalues = _low_then_high(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    numbers = *_scales_and_minima(blocks[:, 4:16]), _halves(blocks, 0), _halves(blocks, 2)
    return _Numbers(_flat(qvalues | fifth << np.uint8(4)), *numbers)


def _q6_k(blocks: Uint8Array) -> _Numbers:
    # Half a block has four runs of 32 elements. A byte of nibbles belongs to two runs, a byte of upper bits to four.
    low = _low_then_high(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    qvalues = low | _pairs_of_bits(blocks[:, 128:192]) << np.uint8(4)
    return _Numbers(_flat(qvalues), blocks[:, 192:208].view(np.int8), None, _halves(blocks, 208))


_TABLE: Final = np.array([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], np.uint8)


def _iq4_xs(blocks: Uint8Array) -> _Numbers:
    qvalues = _TABLE[_flat(_low_then_high(blocks[:, 8:].reshape(-1, 8, 16)))]
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=-1)
    upper = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    scales = (_flat(low) | upper.astype(np.uint8) << np.uint8(4)).view(np.int8) - np.int8(32)
    return _Numbers(qvalues, scales, None, _halves(blocks, 0))


_MXFP4_TABLE: Final = TWICE.view(np.uint8) ^ np.uint8(128)
"""Twice the sixteen values of MXFP4, plus 128, so that they are unsigned."""


def _mxfp4(blocks: Uint8Array) -> _Numbers:
    qvalues = _MXFP4_TABLE[_low_then_high(blocks[:, 1:])]
    exponents = blocks[:, :1].astype(np.int32) - 128  # the scale is halved, because the table has twice the values
    is_used = (qvalues != 128).any(axis=1, keepdims=True)
    wrong = exponents[is_used & ((exponents < _LEAST_EXPONENT) | (exponents > _LARGEST_EXPONENT))]
    if wrong.size:
        rule = f"must be from {_LEAST_EXPONENT + 128} to {_LARGEST_EXPONENT + 128}"
        raise ModelError(
            f"exponents of MXFP4 blocks {rule}, so that float16 can hold their scales. Found: {wrong[0] + 128}"
        )
    scales = np.ldexp(np.float32(1), np.where(is_used, exponents, 0)).astype(np.float16)
    return _Numbers(qvalues, scales)


_LEAST_EXPONENT, _LARGEST_EXPONENT = -24, 15
"""Minimum and maximum exponent of the powers of two that float16 represents."""

BLOCKS: Final[Mapping[int, BlockType]] = {
    2: BlockType("Q4_0", 32, 18, _after_halves(_low_then_high), bits=4, zero=8),
    3: BlockType("Q4_1", 32, 20, _after_halves(_low_then_high, has_minima=True), bits=4, has_minima=True),
    6: BlockType("Q5_0", 32, 22, _after_halves(_five_bits), bits=5, zero=16),
    7: BlockType("Q5_1", 32, 24, _after_halves(_five_bits, has_minima=True), bits=5, has_minima=True),
    8: BlockType("Q8_0", 32, 34, _after_halves(lambda values: values ^ np.uint8(128)), bits=8, zero=128),
    10: BlockType("Q2_K", 256, 84, _q2_k, bits=4, group=16, has_minima=True),
    11: BlockType("Q3_K", 256, 110, _q3_k, bits=4, zero=4, group=16),
    12: BlockType("Q4_K", 256, 144, _q4_k, bits=4, has_minima=True),
    13: BlockType("Q5_K", 256, 176, _q5_k, bits=5, has_minima=True),
    14: BlockType("Q6_K", 256, 210, _q6_k, bits=6, zero=32, group=16),
    20: BlockType("IQ4_NL", 32, 18, _after_halves(lambda nibbles: _TABLE[_low_then_high(nibbles)]), bits=8, zero=128),
    23: BlockType("IQ4_XS", 256, 136, _iq4_xs, bits=8, zero=128),
    39: BlockType("MXFP4", 32, 17, _mxfp4, bits=8, zero=128),
}
