"""Quantizes weights on all cores, with results bit-identical to the NumPy code of `formats.quantized_tensor`."""

from __future__ import annotations

import numpy as np

from llm_serving.errors import ModelError
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.formats.stored_tensor import Array
from llm_serving.kernels import library

_DTYPES = {"uint16": b"bfloat16", "float16": b"float16", "float32": b"float32"}


def quantize(weight: Array, bits: int, group_size: int | None = None, rotates: bool = False) -> QuantizedTensor:
    """Quantize a weight [out, in] symmetrically to 8 or 4 bits, as `quantize_w8` and `quantize_w4` do.

    Args:
        weight: float32, float16, or bfloat16 as uint16 bits; not copied if it is C-contiguous.
        group_size: Columns with one scale, a divisor of the columns; None: all columns.
        rotates: See `QuantizedTensor.rotated`.

    Raises:
        ModelError: As those functions do.
        KernelError: The operator library cannot be compiled, or memory is insufficient.
    """
    if weight.ndim != 2 or str(weight.dtype) not in _DTYPES:
        raise ModelError(f"a quantized weight must be a matrix of numbers. Given: {weight.dtype} {list(weight.shape)}")
    (out, width), rows = weight.shape, np.ascontiguousarray(weight)
    group = max(1, width) if group_size is None else group_size
    if group < 1 or width % group:
        raise ModelError(f"group_size must divide the {width} columns of the matrix. Given: {group}")
    qvalues = np.empty((out, width), np.int8) if bits == 8 else np.empty((out, width), np.uint8)
    scales = np.empty((out, max(1, width // group)), np.float32)
    sizes = out, width, bits, group, rotates
    arrays = qvalues.ctypes.data, scales.ctypes.data
    status = library.done(
        library.load().llm_round_to_qvalues(rows.ctypes.data, _DTYPES[str(weight.dtype)], *sizes, *arrays)
    )
    if status != 0:
        raise ModelError("a quantized weight must hold finite numbers only")
    return QuantizedTensor(qvalues, scales, None, bits, group, rotated=rotates)
