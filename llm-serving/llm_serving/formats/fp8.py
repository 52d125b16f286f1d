"""Weights in 8-bit floating point (e4m3, Micikevicius et al. 2022), with one scale, or one for each row or block.

    weight              [out, in]    F8_E4M3
    weight_scale        [], [1], [out], [out, 1] or, per block, [out / rows, in / columns]
    weight_scale_inv    another name of weight_scale; despite this name it is not inverted

They are dequantized to float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llm_serving.errors import ModelError
from llm_serving.formats.packed import PackedTensor, Parts, ReadableTensor, assemble_weights, part
from llm_serving.formats.quantized_tensor import check_scales, check_values
from llm_serving.formats.stored_tensor import NUMPY_DTYPES, Array, to_float32

SCALES: Final = ("weight_scale_inv", "weight_scale")
IGNORED: Final = (
    *("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "output_scale"),
    *("k_scale", "v_scale", "q_scale", "kv_scale"),
)
"""Name endings of tensors that are ignored: scales of activations and of a KV cache."""


@dataclass(frozen=True)
class Fp8:
    """The FP8 scheme. `block`: rows and columns of a block that shares a scale; None: there are no blocks."""

    description: str
    block: tuple[int, int] | None = None
    activation_bits: int | None = None
    form: None = None

    def weights(self, tensors: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
        left = {name: each for name, each in tensors.items() if name.rpartition(".")[2] not in IGNORED}
        return assemble_weights(left, ("weight", *SCALES), self.packed)

    def packed(self, name: str, parts: Parts) -> ReadableTensor:
        """Combine the parts of one weight. Return an unquantized weight unchanged.

        Raise ModelError if the parts do not match each other.
        """
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
        return PackedTensor(name, (out, width), parts, lambda arrays: _values(arrays["weight"], arrays[ending], block))

    def _block_of(self, scale: tuple[int, ...], out: int, width: int) -> tuple[int, int] | None:
        if scale in ((), (1,), (1, 1)):
            return max(1, out), max(1, width)
        if scale in ((out,), (out, 1)):
            return 1, max(1, width)
        rows, columns = self.block or (1, 1)
        fits = self.block is not None and scale == (-(-out // rows), -(-width // columns))
        return (rows, columns) if fits else None


def _values(bits: Array, scale: Array, block: tuple[int, int]) -> Array:
    rows, columns = block
    out, width = bits.shape
    values: Array = _NUMBERS[np.asarray(bits)]
    scales = to_float32(scale).reshape(-(-out // rows), -(-width // columns))
    check_scales(scales)
    by_column = np.repeat(scales, columns, axis=1)[:, :width]
    with np.errstate(over="ignore"):
        for number, start in enumerate(range(0, out, rows)):
            values[start : start + rows] *= by_column[number]
    check_values(values)
    return values


def _numbers() -> NDArray[np.float32]:
    """Return the values of all 256 bytes: sign, 4 exponent bits with bias 7, 3 fraction bits. If all exponent and
    fraction bits are set, the value is NaN.
    """
    bits = np.arange(128)
    exponent, fraction = bits >> 3, bits & 7
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    magnitude = np.where(exponent == 0, np.ldexp(fraction / 8, -6), normal)
    magnitude[127] = np.nan
    numbers: NDArray[np.float32] = np.concatenate([magnitude, -magnitude]).astype(np.float32)
    return numbers


_NUMBERS: Final = _numbers()
