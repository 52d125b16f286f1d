"""Quantizes matrices to 8 and 4 bits, and returns the arrays that the compressed-tensors format stores for them."""

from __future__ import annotations

from typing import Final

import numpy as np
from llm_serving.errors import ModelError
from llm_serving.formats.compressed_tensors import PACKED, ROTATION_ROOT, SCALE, SHAPE
from llm_serving.formats.quantized_tensor import (
    SAFE_SCALE,
    SYMMETRIC_ZERO,
    QuantizedTensor,
    Uint8Array,
    row_blocks,
    values_per_word,
)
from llm_serving.formats.stored_tensor import Array, to_float32
from numpy.typing import NDArray

STEPS: Final = (-8.0, -7.5, -8.5, -9.25, -10.0, -11.0)
"""Divisors of the largest element of a group of symmetric 4-bit values, each of which gives a scale to try."""
_LANES: Final = 16
"""Number of partial sums of a group. Column j is added to sum j % 16, as the kernels do."""


def quantize_w8(weight: Array) -> QuantizedTensor:
    """Quantize each row of a matrix [out, in] to integers from -127 to 127. A row's scale is its largest magnitude /
    127. bfloat16 elements are given as uint16 bits. Raise ModelError if `weight` is no matrix, or has infinity or NaN.
    """
    _check(weight)
    qvalues = np.empty(weight.shape, np.int8)
    scales = np.empty((weight.shape[0], 1), np.float32)
    for rows in row_blocks(*weight.shape):
        values = _finite(weight[rows])
        scales[rows] = _usable(np.abs(values).max(axis=1, initial=0, keepdims=True) / np.float32(127))
        qvalues[rows] = np.clip(np.rint(values / scales[rows]), -127, 127)
    return QuantizedTensor(qvalues, scales, None, 8, max(1, weight.shape[1]))


def quantize_w4(weight: Array, group_size: int) -> QuantizedTensor:
    """Quantize each group of `group_size` columns to 4 bits. `weight` and the raised errors are as in `quantize_w8`.

    Quantized values are integers from -8 to 7 times a scale. The scale, which may be negative, is the element of
    largest magnitude divided by a number in `STEPS`, chosen for the smallest squared error of the group. With this
    scale, matrix products would be too small, by 0.7 % on average. So the scale is enlarged until the dot product of
    the group and its dequantized values equals the dot product of the group with itself.
    """
    _check(weight)
    out, width = weight.shape
    if group_size < 1 or width % group_size:
        raise ModelError(f"group_size must divide the {width} columns of the matrix. Given: {group_size}")
    qvalues = np.empty((out, width), np.uint8)
    scales = np.empty((out, width // group_size), np.float32)
    for rows in row_blocks(out, width):
        values = _finite(weight[rows]).reshape(-1, scales.shape[1], group_size)
        scales[rows], found = _best_scales(values)
        qvalues[rows] = found.reshape(-1, width)
    return QuantizedTensor(qvalues, scales, None, 4, group_size)


def _best_scales(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    smallest, largest = values.min(axis=2, initial=0), values.max(axis=2, initial=0)
    largest = np.where(largest >= -smallest, largest, smallest)
    scale, found, error = _rounded(values, largest / np.float32(STEPS[0]))
    for step in STEPS[1:]:
        other, values_of_other, error_of_other = _rounded(values, largest / np.float32(step))
        better = error_of_other < error
        scale, error = np.where(better, other, scale), np.where(better, error_of_other, error)
        found = np.where(better[..., None], values_of_other, found)
    one = np.float32(1)
    numbers: NDArray[np.float32] = values * (one / scale)[..., None]
    squares, products = _sums(numbers * numbers), _sums(numbers * found)
    changes = (products > 0) & (np.abs(scale) < SAFE_SCALE)
    return scale * (np.where(changes, squares, one) / np.where(changes, products, one)), found + SYMMETRIC_ZERO


def _rounded(
    values: NDArray[np.float32], scale: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    scale = _usable(scale)
    found = np.clip(np.rint(values * (np.float32(1) / scale)[..., None]), -8, 7)
    with np.errstate(over="ignore"):
        errors = values - found * scale[..., None]
        return scale, found, _sums(errors * errors)


def _sums(terms: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the sum of each group of columns, [rows, groups]. Elements are added in the same order as in kernels."""
    lanes = np.pad(terms, ((0, 0), (0, 0), (0, -terms.shape[2] % _LANES))).reshape(*terms.shape[:2], -1, _LANES)
    sums: NDArray[np.float32] = np.add.accumulate(lanes, axis=2)[:, :, -1]
    while sums.shape[2] > 1:
        sums = sums[..., : sums.shape[2] // 2] + sums[..., sums.shape[2] // 2 :]
    return sums[..., 0]


def _check(weight: Array) -> None:
    if weight.ndim != 2:
        raise ModelError(f"a quantized weight must be a matrix. Given: shape {list(weight.shape)}")


def _finite(weight: Array) -> NDArray[np.float32]:
    values = to_float32(weight)
    if not np.isfinite(values).all():
        raise ModelError("a quantized weight must hold finite numbers only")
    return values


def _usable(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    usable: NDArray[np.float32] = np.where(np.abs(scale) < np.finfo(np.float32).tiny, np.float32(1), scale).astype(
        np.float32
    )
    return usable


def parts_of(tensor: QuantizedTensor, packed: bool) -> dict[str, Array]:
    """Return a symmetric tensor's arrays by name ending, as `pack-quantized` if `packed`, else as `int-quantized`."""
    assert tensor.zeros is None
    assert tensor.g_idx is None
    assert packed or not tensor.rotated
    scales = tensor.scales * ROTATION_ROOT if tensor.rotated else tensor.scales
    if not packed:
        qvalues = tensor.qvalues if tensor.bits == 8 else tensor.qvalues.astype(np.int8) - np.int8(SYMMETRIC_ZERO)
        return {"weight": qvalues, SCALE: scales}
    bits = tensor.qvalues.view(np.uint8)
    qvalues = bits if tensor.bits == 4 else bits ^ np.uint8(128)
    shape = np.array(tensor.shape, np.int64)
    return {PACKED: pack_words(qvalues, tensor.bits), SCALE: scales, SHAPE: shape}


def pack_words(qvalues: Uint8Array, bits: int) -> NDArray[np.int32]:
    """Pack values [..., n] into 32-bit words [..., ceil(n / values_per_word(bits))], padded with zeros at the end."""
    missing = -qvalues.shape[-1] % values_per_word(bits)
    if missing:
        qvalues = np.concatenate([qvalues, np.zeros((*qvalues.shape[:-1], missing), np.uint8)], axis=-1)
    packed = qvalues if bits == 8 else qvalues[..., 0::2] | qvalues[..., 1::2] << 4
    return np.ascontiguousarray(packed).view(np.int32)
