"""GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel write it, of 4 and of 8 bits.

qweight   [in * bits / 32, out]        I32: words of codes of `in`, the first in the lowest bits
qzeros    [groups, out * bits / 32]    I32: words of zeros of `out`; less one in files of the first version
scales    [groups, out]
g_idx     [in]                         I32: group of each column; with act-order in no order
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from llm_serving.errors import ModelError
from llm_serving.formats.packed import PackedTensor, Parts, ReadableTensor, check_shape, part, put_together
from llm_serving.formats.quantized import SYMMETRIC_ZERO, QuantizedTensor
from llm_serving.formats.stored import NUMPY_DTYPES, Array, to_float32
from llm_serving.formats.words import Uint8Array, codes_of_words, per_word

_ENDINGS: Final = ("qweight", "qzeros", "scales", "g_idx")


@dataclass(frozen=True)
class Gptq:
    """
    Attributes:
        bits: 4 or 8.
        group_size: Columns of a group; 0: a row is one.
        zeros_less_one: Whether files have them so, as the first version of the form has.
    """

    described: str
    bits: int
    group_size: int
    zeros_less_one: bool = True
    activation_bits: int | None = None

    def weights(self, tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
        return put_together(tensors, _ENDINGS, self._packed)

    def _packed(self, name: str, parts: Parts) -> PackedTensor:
        in_words, out = part(name, parts, "qweight", ["I32"]).shape
        width = in_words * per_word(self.bits)
        group_size = self.group_size or width
        groups = -(-width // group_size)
        part(name, parts, "scales", [*NUMPY_DTYPES])
        check_shape(name, parts, "scales", (groups, out))
        part(name, parts, "qzeros", ["I32"])
        check_shape(name, parts, "qzeros", (groups, -(-out // per_word(self.bits))))
        if "g_idx" in parts:
            part(name, parts, "g_idx", ["I32"], 1)
            check_shape(name, parts, "g_idx", (width,))
        return PackedTensor(name, (out, width), parts, self._unpacked)

    def _unpacked(self, arrays: Mapping[str, Array]) -> QuantizedTensor | Array:
        codes = codes_of_words(np.asarray(arrays["qweight"]).T, self.bits)
        out, width = codes.shape
        group_size = self.group_size or width
        scales = np.ascontiguousarray(to_float32(arrays["scales"]).T)
        zeros = codes_of_words(arrays["qzeros"], self.bits)[:, :out].T
        if self.zeros_less_one:
            zeros = zeros + np.uint8(1) & np.uint8(2**self.bits - 1)
        zeros = np.ascontiguousarray(zeros)
        columns = None
        if "g_idx" in arrays:
            columns = group_of_columns(arrays["g_idx"], group_size, scales.shape[1])
        return quantized(codes, scales, zeros, self.bits, group_size, columns)


def group_of_columns(given: Array, group_size: int, groups: int) -> Array | None:
    """Group of each column; None where columns are in order.

    Raises:
        ModelError: One is no group.
    """
    columns = np.array(given, np.int32)
    if columns.size and not 0 <= int(columns.min()) <= int(columns.max()) < groups:
        raise ModelError(f"g_idx must be groups from 0 to {groups - 1}")
    return None if np.array_equal(columns, np.arange(len(columns)) // group_size) else columns


def quantized(
    codes: Uint8Array, scales: Array, zeros: Uint8Array | None, bits: int, group_size: int, columns: Array | None
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
    group_of = np.arange(codes.shape[1]) // group_size if columns is None else columns
    values: Array = codes.astype(np.float32)
    values -= zeros[:, group_of]
    values *= scales[:, group_of]
    return values
