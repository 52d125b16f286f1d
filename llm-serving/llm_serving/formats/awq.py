"""AWQ (Lin et al. 2023) in AutoAWQ's `gemm` format, 4 bits.

    qweight   [in, out / 8]        I32: quantized values packed along `out`
    qzeros    [groups, out / 8]    I32: zero points packed along `out`
    scales    [groups, out]

A word stores the values of eight outputs in the order 0, 2, 4, 6, 1, 3, 5, 7, from its lowest bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from llm_serving.formats.packed import PackedTensor, Parts, ReadableTensor, assemble_weights, check_shape, part
from llm_serving.formats.quantized_tensor import (
    QuantizedTensor,
    QValuesForm,
    Uint8Array,
    from_unsigned,
    unpack_words,
    values_per_word,
)
from llm_serving.formats.stored_tensor import NUMPY_DTYPES, Array, to_float32

_ENDINGS: Final = ("qweight", "qzeros", "scales")
_POSITION_OF_ROW: Final = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class Awq:
    """The AWQ scheme. `group_size`: columns of a group; 0: a row is one group."""

    description: str
    group_size: int
    activation_bits: int | None = None

    @property
    def form(self) -> QValuesForm:
        return QValuesForm(4, self.group_size)

    def weights(self, tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
        return assemble_weights(tensors, _ENDINGS, self._packed)

    def _packed(self, name: str, parts: Parts) -> PackedTensor:
        width, out_words = part(name, parts, "qweight", ["I32"]).shape
        out = out_words * values_per_word(4)
        groups = -(-width // (self.group_size or width or 1))
        part(name, parts, "scales", [*NUMPY_DTYPES])
        check_shape(name, parts, "scales", (groups, out))
        part(name, parts, "qzeros", ["I32"])
        check_shape(name, parts, "qzeros", (groups, out_words))
        return PackedTensor(name, (out, width), parts, self._unpacked)

    def _unpacked(self, arrays: Mapping[str, Array]) -> QuantizedTensor:
        qvalues, zeros = (_unpack_rows(arrays[name]) for name in ("qweight", "qzeros"))
        scales = np.ascontiguousarray(to_float32(arrays["scales"]).T)
        return from_unsigned(qvalues, scales, zeros, 4, self.group_size or qvalues.shape[1], None)


def _unpack_rows(words: Array) -> Uint8Array:
    qvalues = unpack_words(words, 4).reshape(len(words), -1, 8)
    return np.ascontiguousarray(qvalues[:, :, _POSITION_OF_ROW].reshape(len(words), -1).T)
