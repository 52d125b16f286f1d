"""Weights of 4-bit floating point with a shared power of two (MXFP4 of the OCP Microscaling Formats), as in gpt-oss.

    <name>_blocks   U8 [experts, out, in / 32, 16]: two e2m1 values in a byte, the first in the lower four bits
    <name>_scales   U8 [experts, out, in / 32]: exponent of two, plus 127, of 32 inputs

Twice an e2m1 value is an integer. So kernels that support groups of 32 use these weights as 8-bit values without
rounding. For other kernels they are dequantized to float32, in the order of the unquantized
tensor <name> [experts, in, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from llm_serving.errors import ModelError
from llm_serving.formats.packed import PackedTensor, ReadableTensor, check_plain
from llm_serving.formats.quantized_tensor import QuantizedTensor, QValuesForm
from llm_serving.formats.stored_tensor import Array, StoredTensor

_ENDINGS: Final = ("_blocks", "_scales")
_GROUP: Final = 32
_BYTES: Final = _GROUP // 2
_EXPONENT_BIAS: Final = 127
_MAX_EXPONENT: Final = 120
"""Maximum exponent of a scale, with which all values are finite. The stored byte 255 means NaN."""
TWICE: Final = np.array([sign * each for sign in (1, -1) for each in (0, 1, 2, 3, 4, 6, 8, 12)], np.int8)
"""Twice the value of each of the sixteen bit patterns of e2m1."""


@dataclass(frozen=True)
class Mxfp4:
    """The MXFP4 scheme."""

    description: str
    activation_bits: int | None = None

    @property
    def form(self) -> QValuesForm:
        return QValuesForm(8, _GROUP)

    def weights(self, tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
        weights = {name: each for name, each in tensors.items() if not name.endswith(_ENDINGS)}
        for name in dict.fromkeys(each[: -len(_ENDINGS[0])] for each in tensors if each.endswith(_ENDINGS)):
            blocks, scales = (tensors.get(name + ending) for ending in _ENDINGS)
            if not isinstance(blocks, StoredTensor) or not isinstance(scales, StoredTensor):
                file = (blocks or scales or next(iter(tensors.values()))).file
                raise ModelError(f"{file}: {name} must have {' and '.join(name + ending for ending in _ENDINGS)}")
            if name in weights:
                raise ModelError(f"{blocks.file}: tensor {name} occurs twice, also as {name}{_ENDINGS[0]}")
            weights[name] = _packed(name, blocks, scales)
        return check_plain(weights)


def _packed(name: str, blocks: StoredTensor, scales: StoredTensor) -> PackedTensor:
    shape = blocks.shape
    fits = len(shape) == 4 and shape[3] == _BYTES and scales.shape == shape[:3]
    if not fits or (blocks.dtype, scales.dtype) != ("U8", "U8"):
        raise ModelError(
            f"{blocks.file}: {name}: blocks must be U8 [experts, out, groups, {_BYTES}] and scales U8 [experts, out, "
            f"groups]. Found: {blocks.dtype} {list(shape)}, {scales.dtype} {list(scales.shape)}"
        )
    unquantized = shape[0], shape[2] * _GROUP, shape[1]
    return PackedTensor(name, unquantized, {"blocks": blocks, "scales": scales}, _unpack)


def _unpack(arrays: Mapping[str, Array]) -> QuantizedTensor:
    return quantized(arrays["blocks"], arrays["scales"])


def quantized(blocks: Array, scales: Array) -> QuantizedTensor:
    """Return the matrix [experts * out, in] as 8-bit values. Raise ModelError if an exponent is too large."""
    exponents = np.asarray(scales).astype(np.int16) - _EXPONENT_BIAS
    if exponents.size and int(exponents.max()) > _MAX_EXPONENT:
        raise ModelError(f"exponents of scales must be at most {_MAX_EXPONENT}. Found: {int(exponents.max())}")
    halves = np.asarray(blocks)
    count, out, groups = exponents.shape
    qvalues = np.empty((count * out, groups * _BYTES, 2), np.int8)
    qvalues[..., 0] = TWICE[halves & 15].reshape(qvalues.shape[:2])
    qvalues[..., 1] = TWICE[halves >> 4].reshape(qvalues.shape[:2])
    units = np.ldexp(np.float32(1), exponents - 1).reshape(count * out, groups)
    return QuantizedTensor(qvalues.reshape(count * out, -1), units, None, 8, _GROUP)
