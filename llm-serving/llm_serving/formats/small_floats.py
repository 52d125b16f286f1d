"""Weights in floating point of 8 and 4 bits: FP8, and MXFP4 of gpt-oss.

FP8 is e4m3 (Micikevicius et al. 2022) with one scale, or one for each row or block. It is dequantized to float32.

    weight              [out, in]    F8_E4M3
    weight_scale        [], [1], [out], [out, 1] or, per block, [out / rows, in / columns]
    weight_scale_inv    another name of weight_scale; despite this name it is not inverted

MXFP4 (OCP Microscaling Formats) has a shared power of two for 32 inputs.

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
from numpy.typing import NDArray

from llm_serving.errors import ModelError
from llm_serving.formats.packed import PackedTensor, Parts, ReadableTensor, Scheme, assemble_weights, check_plain, part
from llm_serving.formats.quantized_tensor import QuantizedTensor, QValuesForm, check_scales, check_values
from llm_serving.formats.stored_tensor import NUMPY_DTYPES, Array, StoredTensor, to_float32

_MXFP4_ENDINGS: Final = ("_blocks", "_scales")
_GROUP: Final = 32
_BYTES: Final = _GROUP // 2
_EXPONENT_BIAS: Final = 127
_MAX_EXPONENT: Final = 120
"""Maximum exponent of a scale, with which all values are finite. The stored byte 255 means NaN."""
TWICE: Final = np.array([sign * each for sign in (1, -1) for each in (0, 1, 2, 3, 4, 6, 8, 12)], np.int8)
"""Twice the value of each of the sixteen bit patterns of e2m1."""


@dataclass(frozen=True)
class Mxfp4(Scheme):
    description: str

    @property
    def form(self) -> QValuesForm:
        return QValuesForm(8, _GROUP)

    def weights(self, tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
        weights = {name: each for name, each in tensors.items() if not name.endswith(_MXFP4_ENDINGS)}
        for name in dict.fromkeys(each[: -len(_MXFP4_ENDINGS[0])] for each in tensors if each.endswith(_MXFP4_ENDINGS)):
            blocks, scales = (tensors.get(name + ending) for ending in _MXFP4_ENDINGS)
            if not isinstance(blocks, StoredTensor) or not isinstance(scales, StoredTensor):
                file = (blocks or scales or next(iter(tensors.values()))).file
                raise ModelError(f"{file}: {name} must have {' and '.join(name + ending for ending in _MXFP4_ENDINGS)}")
            if name in weights:
                raise ModelError(
                    f"{blocks.file}: tensor {name} occurs twice: under this name, and as {name}{_MXFP4_ENDINGS[0]}"
                )
            weights[name] = _packed_mxfp4(name, blocks, scales)
        return check_plain(weights)


def _packed_mxfp4(name: str, blocks: StoredTensor, scales: StoredTensor) -> PackedTensor:
    shape = blocks.shape
    fits = len(shape) == 4 and shape[3] == _BYTES and scales.shape == shape[:3]
    if not fits or (blocks.dtype, scales.dtype) != ("U8", "U8"):
        raise ModelError(
            f"{blocks.file}: {name}: blocks must be U8 [experts, out, groups, {_BYTES}] and scales U8 [experts, out, "
            f"groups]. Found: {blocks.dtype} {list(shape)}, {scales.dtype} {list(scales.shape)}"
        )
    unquantized = shape[0], shape[2] * _GROUP, shape[1]
    return PackedTensor(name, unquantized, {"blocks": blocks, "scales": scales}, lambda arrays: quantized(**arrays))


def quantized(blocks: Array, scales: Array) -> QuantizedTensor:
    """Return MXFP4 weights as 8-bit values [experts * out, in]. Raise ModelError if an exponent is too large."""
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


SCALES: Final = ("weight_scale_inv", "weight_scale")
IGNORED: Final = (
    *("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "output_scale"),
    *("k_scale", "v_scale", "q_scale", "kv_scale"),
)
"""Name endings of tensors that are ignored: scales of activations and of a KV cache."""


@dataclass(frozen=True)
class Fp8(Scheme):
    """The FP8 scheme. `block` is the rows and columns that share a scale, or None if scales are not per block."""

    description: str
    block: tuple[int, int] | None = None

    def weights(self, tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
        left = {name: each for name, each in tensors.items() if name.rpartition(".")[2] not in IGNORED}
        return assemble_weights(left, ("weight", *SCALES), self.packed)

    def packed(self, name: str, parts: Parts) -> ReadableTensor:
        """Combine the parts of one weight. Return an unquantized weight unchanged."""
        weight = parts.get("weight")
        if weight is not None and weight.dtype in NUMPY_DTYPES and len(parts) == 1:
            return weight
        out, width = part(name, parts, "weight", ["F8_E4M3"]).shape
        ending = next((each for each in SCALES if each in parts), SCALES[0])
        shape = parts[ending].shape if ending in parts else ()
        scale = part(name, parts, ending, [*NUMPY_DTYPES], len(shape))
        block = self._block_of(scale.shape, out, width)
        if block is None:
            raise ModelError(
                f"{scale.file}: {name}: {ending} must be one scale, one per row or one per block of "
                f"{list(self.block or ())} in {[out, width]}. Found: {list(scale.shape)}"
            )
        return PackedTensor(
            name, (out, width), parts, lambda arrays: _fp8_values(arrays["weight"], arrays[ending], block)
        )

    def _block_of(self, scale: tuple[int, ...], out: int, width: int) -> tuple[int, int] | None:
        if scale in ((), (1,), (1, 1)):
            return max(1, out), max(1, width)
        if scale in ((out,), (out, 1)):
            return 1, max(1, width)
        rows, columns = self.block or (1, 1)
        fits = self.block is not None and scale == (-(-out // rows), -(-width // columns))
        return (rows, columns) if fits else None


def _fp8_values(bits: Array, scale: Array, block: tuple[int, int]) -> Array:
    rows, columns = block
    out, width = bits.shape
    values: Array = _FP8_NUMBERS[np.asarray(bits)]
    scales = to_float32(scale).reshape(-(-out // rows), -(-width // columns))
    check_scales(scales)
    by_column = np.repeat(scales, columns, axis=1)[:, :width]
    with np.errstate(over="ignore"):
        for number, start in enumerate(range(0, out, rows)):
            values[start : start + rows] *= by_column[number]
    check_values(values)
    return values


def _fp8_numbers() -> NDArray[np.float32]:
    """Return the values of all 256 bytes of FP8. A byte has a sign, 4 exponent bits with bias 7 and 3 fraction bits. If
    all exponent and fraction bits are set, the value is NaN.
    """
    bits = np.arange(128)
    exponent, fraction = bits >> 3, bits & 7
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    magnitude = np.where(exponent == 0, np.ldexp(fraction / 8, -6), normal)
    magnitude[127] = np.nan
    numbers: NDArray[np.float32] = np.concatenate([magnitude, -magnitude]).astype(np.float32)
    return numbers


_FP8_NUMBERS: Final = _fp8_numbers()
