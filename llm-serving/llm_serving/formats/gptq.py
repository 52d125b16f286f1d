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

from llm_serving.formats.packed import PackedTensor, Parts, ReadableTensor, check_shape, part, put_together
from llm_serving.formats.quantized_tensor import (
    QuantizedTensor,
    codes_of_words,
    group_of_columns,
    of_unsigned,
    per_word,
)
from llm_serving.formats.stored_tensor import NUMPY_DTYPES, Array, to_float32

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
        groups = -(-width // (self.group_size or width or 1))
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
        return of_unsigned(codes, scales, zeros, self.bits, group_size, columns)
