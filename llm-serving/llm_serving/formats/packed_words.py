"""Integer weights packed into 32-bit words, as GPTQ and AWQ store them.

GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel write it, 4 and 8 bits:
    qweight   [in * bits / 32, out]        I32: quantized values packed along `in`, the first in the lowest bits
    qzeros    [groups, out * bits / 32]    I32: zero points packed along `out`; version 1 stores each minus 1
    scales    [groups, out]
    g_idx     [in]                         I32: group of each column; not ascending with act-order

AWQ (Lin et al. 2023) in AutoAWQ's `gemm` format, 4 bits:
    qweight   [in, out / 8]                I32: quantized values packed along `out`
    qzeros    [groups, out / 8]            I32: zero points packed along `out`
    scales    [groups, out]

A word of AWQ stores the values of eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7, from its lowest bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from llm_serving.formats.packed import PackedTensor, Parts, ReadableTensor, Scheme, assemble_weights, check_shape, part
from llm_serving.formats.quantized_tensor import (
    QuantizedTensor,
    QValuesForm,
    Uint8Array,
    from_unsigned,
    group_of_columns,
    unpack_words,
    values_per_word,
)
from llm_serving.formats.stored_tensor import NUMPY_DTYPES, Array, to_float32

_ENDINGS: Final = ("qweight", "qzeros", "scales")
_AWQ_POSITION_OF_ROW: Final = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Gptq(Scheme):
    """The GPTQ scheme.

    Attributes:
        group_size: Number of columns in a group. 0 means that a row is one group.
        zeros_less_one: Whether files store each zero point minus 1, as version 1 of the format does.
        act_order: Whether the columns of a group may be apart from each other (`desc_act`).
        has_zeros: Whether zero points may differ from 2^(bits - 1), the zero point of symmetric weights.
    """

    description: str
    bits: int
    group_size: int
    zeros_less_one: bool = True
    act_order: bool = False
    has_zeros: bool = False

    @property
    def form(self) -> QValuesForm:
        return QValuesForm(self.bits, self.group_size, not self.act_order, self.has_zeros and self.bits == 8)

    def weights(self, tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
        return assemble_weights(tensors, (*_ENDINGS, "g_idx"), self._packed)

    def _packed(self, name: str, parts: Parts) -> PackedTensor:
        in_words, out = part(name, parts, "qweight", ["I32"]).shape
        width = in_words * values_per_word(self.bits)
        _check_groups(name, parts, -(-width // (self.group_size or width or 1)), out, self.bits)
        if "g_idx" in parts:
            part(name, parts, "g_idx", ["I32"], 1)
            check_shape(name, parts, "g_idx", (width,))
        return PackedTensor(name, (out, width), parts, self._unpacked)

    def _unpacked(self, arrays: Mapping[str, Array]) -> QuantizedTensor:
        qvalues = unpack_words(np.asarray(arrays["qweight"]).T, self.bits)
        out, width = qvalues.shape
        group_size = self.group_size or max(1, width)
        scales = np.ascontiguousarray(to_float32(arrays["scales"]).T)
        zeros = unpack_words(arrays["qzeros"], self.bits)[:, :out].T
        if self.zeros_less_one:
            zeros = zeros + np.uint8(1) & np.uint8(2**self.bits - 1)
        zeros = np.ascontiguousarray(zeros)
        columns = None
        if "g_idx" in arrays:
            columns = group_of_columns(arrays["g_idx"], group_size, scales.shape[1])
        return from_unsigned(qvalues, scales, zeros, self.bits, group_size, columns)


@dataclass(frozen=True)
class Awq(Scheme):
    """The AWQ scheme. `group_size` is the number of columns in a group; 0 means that a row is one group."""

    description: str
    group_size: int

    @property
    def form(self) -> QValuesForm:
        return QValuesForm(4, self.group_size)

    def weights(self, tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
        return assemble_weights(tensors, _ENDINGS, self._packed)

    def _packed(self, name: str, parts: Parts) -> PackedTensor:
        width, out_words = part(name, parts, "qweight", ["I32"]).shape
        out = out_words * values_per_word(4)
        _check_groups(name, parts, -(-width // (self.group_size or width or 1)), out, 4)
        return PackedTensor(name, (out, width), parts, self._unpacked)

    def _unpacked(self, arrays: Mapping[str, Array]) -> QuantizedTensor:
        qvalues, zeros = (_unpack_awq_rows(arrays[name]) for name in ("qweight", "qzeros"))
        scales = np.ascontiguousarray(to_float32(arrays["scales"]).T)
        return from_unsigned(qvalues, scales, zeros, 4, self.group_size or max(1, qvalues.shape[1]), None)


def _unpack_awq_rows(words: Array) -> Uint8Array:
    qvalues = unpack_words(words, 4).reshape(len(words), -1, 8)
    return np.ascontiguousarray(qvalues[:, :, _AWQ_POSITION_OF_ROW].reshape(len(words), -1).T)


def _check_groups(name: str, parts: Parts, groups: int, out: int, bits: int) -> None:
    part(name, parts, "scales", [*NUMPY_DTYPES])
    check_shape(name, parts, "scales", (groups, out))
    part(name, parts, "qzeros", ["I32"])
    check_shape(name, parts, "qzeros", (groups, -(-out // values_per_word(bits))))
