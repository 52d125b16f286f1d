"""AWQ (Lin et al. 2023) as AutoAWQ writes it in its form `gemm`, of 4 bits.

    qweight   [in, out / 8]        I32: words of codes of `out`
    qzeros    [groups, out / 8]    I32: words of zeros of `out`
    scales    [groups, out]

From its lowest bits a word has the codes of the rows 0, 2, 4, 6, 1, 3, 5, 7 of eight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from llm_serving.formats.packed import PackedTensor, Parts, ReadableTensor, check_shape, part, put_together
from llm_serving.formats.quantized_tensor import QuantizedTensor, Uint8Array, codes_of_words, of_unsigned, per_word
from llm_serving.formats.stored_tensor import NUMPY_DTYPES, Array, to_float32

_ENDINGS: Final = ("qweight", "qzeros", "scales")
_PLACE_OF_ROW: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word the code of each of eight rows is."""


@dataclass(frozen=True)
class Awq:
    """
    Attributes:
        group_size: Columns of a group; 0: a row is one.
    """

    described: str
    group_size: int
    activation_bits: int | None = None

    def weights(self, tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
        return put_together(tensors, _ENDINGS, self._packed)

    def _packed(self, name: str, parts: Parts) -> PackedTensor:
        width, out_words = part(name, parts, "qweight", ["I32"]).shape
        out = out_words * per_word(4)
        groups = -(-width // (self.group_size or width or 1))
        part(name, parts, "scales", [*NUMPY_DTYPES])
        check_shape(name, parts, "scales", (groups, out))
        part(name, parts, "qzeros", ["I32"])
        check_shape(name, parts, "qzeros", (groups, out_words))
        return PackedTensor(name, (out, width), parts, self._unpacked)

    def _unpacked(self, arrays: Mapping[str, Array]) -> QuantizedTensor | Array:
        codes, zeros = (_by_rows(arrays[name]) for name in ("qweight", "qzeros"))
        scales = np.ascontiguousarray(to_float32(arrays["scales"]).T)
        return of_unsigned(codes, scales, zeros, 4, self.group_size or codes.shape[1], None)


def _by_rows(words: Array) -> Uint8Array:
    """[n, out / 8] words -> [out, n] codes."""
    codes = codes_of_words(words, 4).reshape(len(words), -1, 8)
    return np.ascontiguousarray(codes[:, :, _PLACE_OF_ROW].reshape(len(words), -1).T)
