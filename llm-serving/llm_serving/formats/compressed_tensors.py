"""The 4-bit and 8-bit integer weights of the format compressed-tensors, which LLM Compressor writes.

    weight               [out, in]               I8: values of the format `int-quantized` (W8A8; W4A8: -8 to 7)
    weight_packed        [out, in * bits / 32]   I32: values of `pack-quantized` (W4A16, W8A16), plus 2^(bits - 1)
    weight_shape         [2]                     I64 or I32: out, in
    weight_scale         [out, groups], [out] or [1]
    weight_zero_point    [out, groups] I8, or [out * bits / 32, groups] I32, packed along `out`
    weight_g_idx         [in]                    I32: group of each column

Weights that are not quantized are stored as usual. Scales of activations and of a KV cache are ignored, because this
server computes a scale for each row of activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from llm_serving.errors import ModelError
from llm_serving.formats.packed import PackedTensor, Parts, ReadableTensor, Scheme, assemble_weights, check_shape, part
from llm_serving.formats.quantized_tensor import (
    ROTATED_BLOCK,
    QuantizedTensor,
    QValuesForm,
    Uint8Array,
    from_unsigned,
    group_of_columns,
    unpack_words,
    values_per_word,
)
from llm_serving.formats.small_floats import IGNORED, Fp8
from llm_serving.formats.stored_tensor import NUMPY_DTYPES, Array, StoredTensor, to_float32

SCALE, ZERO, PACKED, SHAPE, ORDER = (f"weight_{each}" for each in ("scale", "zero_point", "packed", "shape", "g_idx"))
_ENDINGS: Final = ("weight", SCALE, ZERO, PACKED, SHAPE, ORDER)

ROTATION_ROOT: Final = np.float32(ROTATED_BLOCK**0.5)
"""A file has scales of weights that were multiplied by the Hadamard matrix and divided by this number. The scales of a
`QuantizedTensor` belong to weights divided by its square.
"""
ROTATION: Final = {
    "config_groups": {
        "rotation": {
            "type": "hadamard",
            "head_dim": ROTATED_BLOCK,
            "apply": [
                {"targets": ["Linear"], "location": "input"},
                {"targets": ["Linear"], "location": "weight_input", "inverse": True},
            ],
        }
    }
}
"""The `transform_config` of rotated weights."""


@dataclass(frozen=True)
class CompressedTensors(Scheme):
    """The compressed-tensors scheme with 4-bit and 8-bit integer weights or FP8 weights.

    Attributes:
        group_size: Number of columns in a group. If it is 0, it follows from the number of groups of each weight.
        block: Rows and columns of an FP8 weight that share a scale; None if scales are not per block.
        bits: Bits of each value in tensors named `weight`, where a value takes a whole byte.
        rotated: Whether each 128 columns of packed weights were multiplied by the Hadamard matrix and divided by the
            square root of 128 before they were rounded.
    """

    description: str
    activation_bits: int | None = None
    group_size: int = 0
    block: tuple[int, int] | None = None
    bits: int = 8
    form: QValuesForm | None = None
    in_8_bits: frozenset[str] = frozenset()
    rotated: bool = False

    def weights(self, tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
        left = {name: each for name, each in tensors.items() if name.rpartition(".")[2] not in IGNORED}
        return assemble_weights(left, _ENDINGS, self._packed)

    def _packed(self, name: str, parts: Parts) -> ReadableTensor:
        if (plain := parts.get("weight")) is not None:
            if plain.dtype in NUMPY_DTYPES and len(parts) == 1:
                return plain
            if self.rotated:
                raise ModelError(
                    f"{plain.file}: {name} must be stored as {PACKED}, because the configuration rotates weights. "
                    f"Found: {plain.dtype}"
                )
            if plain.dtype == "F8_E4M3":
                return Fp8(self.description, self.block).packed(name, parts)
            (out, width), bits = part(name, parts, "weight", ["I8"]).shape, self.bits
            shape = out, width
        else:
            shape = _stored_shape(name, parts)
            words = part(name, parts, PACKED, ["I32"]).shape
            fitting = [each for each in (4, 8) if words == (shape[0], -(-shape[1] // values_per_word(each)))]
            if not fitting:
                raise ModelError(
                    f"{parts[PACKED].file}: {name}: {PACKED} must hold {list(shape)} values of 4 or 8 bits in "
                    f"int32 words. Found: words of shape {list(words)}"
                )
            bits = fitting[0]
        groups = self._check_scale(name, parts, shape)
        if (zeros := parts.get(ZERO)) is not None:
            self._check_zeros(name, parts, zeros, (-(-shape[0] // values_per_word(bits)), groups))
        if ORDER in parts:
            part(name, parts, ORDER, ["I32"], 1)
            check_shape(name, parts, ORDER, (shape[1],))
        size = self._columns_of_group(name, parts, shape[1], groups)
        if not self.rotated:
            return PackedTensor(name, shape, parts, lambda arrays: _unpacked(arrays, shape, bits, size))
        if shape[1] % ROTATED_BLOCK:
            raise ModelError(
                f"{parts[PACKED].file}: {name} must have a multiple of {ROTATED_BLOCK} columns, because "
                f"`transform_config` rotates blocks of as many. Found: {shape[1]}"
            )
        return PackedTensor(name, shape, parts, lambda arrays: _rotated(_unpacked(arrays, shape, bits, size)))

    def _check_zeros(self, name: str, parts: Parts, zeros: StoredTensor, packed: tuple[int, int]) -> None:
        """Raise ModelError unless zero points have the shape of the scales or, in 32-bit words, shape `packed`."""
        scale = parts[SCALE].shape
        like_scale = zeros.dtype != "I32" and zeros.shape == scale
        part(name, parts, ZERO, ["I8"] if like_scale else ["I32"], len(scale) if like_scale else 2)
        if not like_scale:
            check_shape(name, parts, ZERO, packed)

    def _check_scale(self, name: str, parts: Parts, shape: tuple[int, int]) -> int:
        scale = part(name, parts, SCALE, [*NUMPY_DTYPES], len(parts[SCALE].shape) if SCALE in parts else 2)
        if scale.shape in ((), (1,), (1, 1), (shape[0],)):
            return 1
        if len(scale.shape) != 2 or scale.shape[0] != shape[0] or not 1 <= scale.shape[1] <= max(1, shape[1]):
            raise ModelError(
                f"{scale.file}: {name}: {SCALE} must hold one scale, one per row or one per group of columns, for a "
                f"weight of shape {list(shape)}. Found: shape {list(scale.shape)}"
            )
        return scale.shape[1]

    def _columns_of_group(self, name: str, parts: Parts, width: int, groups: int) -> int:
        size = width if groups == 1 else -(-width // groups)
        if groups > 1 and self.group_size and -(-width // self.group_size) == groups:
            size = self.group_size
        if -(-width // max(1, size)) != groups:
            raise ModelError(
                f"{parts[SCALE].file}: {name}: {SCALE} must have groups of equal size, only the last of which may be "
                f"smaller. Found: {groups} groups for {width} columns"
            )
        return max(1, size)


def _stored_shape(name: str, parts: Parts) -> tuple[int, int]:
    stored: StoredTensor = part(name, parts, SHAPE, ["I64", "I32"], 1)
    check_shape(name, parts, SHAPE, (2,))
    out, width = (int(length) for length in stored.read())
    if not (0 < out < 2**31 and 0 < width < 2**31):
        raise ModelError(
            f"{stored.file}: {name}: {SHAPE} must hold two dimensions from 1 to {2**31 - 1}. Found: {[out, width]}"
        )
    return out, width


def _unpacked(arrays: Mapping[str, Array], shape: tuple[int, int], bits: int, group_size: int) -> QuantizedTensor:
    scales = np.ascontiguousarray(_by_row(to_float32(arrays[SCALE]), shape[0]))
    zeros = None if ZERO not in arrays else _zeros(arrays[ZERO], scales.shape, bits)
    if PACKED in arrays:
        qvalues = np.ascontiguousarray(unpack_words(arrays[PACKED], bits)[:, : shape[1]])
    else:
        qvalues = _to_unsigned(np.asarray(arrays["weight"]), bits)
    columns = group_of_columns(arrays[ORDER], group_size, scales.shape[1]) if ORDER in arrays else None
    return from_unsigned(qvalues, scales, zeros, bits, group_size, columns)


def _rotated(tensor: QuantizedTensor) -> QuantizedTensor:
    return replace(tensor, scales=tensor.scales / ROTATION_ROOT, rotated=True)


def _to_unsigned(qvalues: Array, bits: int) -> Uint8Array:
    half = 2 ** (bits - 1)
    if qvalues.size and not -half <= int(qvalues.min()) <= int(qvalues.max()) < half:
        raise ModelError(f"weight must hold values from {-half} to {half - 1}")
    return qvalues.view(np.uint8) + np.uint8(half)


def _zeros(given: Array, shape: tuple[int, ...], bits: int) -> Uint8Array:
    if given.dtype == np.int32:
        return np.ascontiguousarray(unpack_words(given.T, bits).T[: shape[0]])
    half = 2 ** (bits - 1)
    signed = np.broadcast_to(_by_row(given, shape[0]), shape).astype(np.int16)
    if not ((signed >= -half) & (signed < half)).all():
        raise ModelError(f"{ZERO} must hold values of {bits} bits")
    zeros: Uint8Array = (signed + half).astype(np.uint8)
    return zeros


def _by_row(values: Array, out: int) -> Array:
    rows = values if values.ndim == 2 else values.reshape(-1, 1)
    return np.broadcast_to(rows, (out, rows.shape[1]))
