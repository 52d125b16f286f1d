"""Prepares weights on all cores: rounds them to 8 or 4 bits, and packs GGUF blocks (csrc/packed_blocks.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_serving.errors import ModelError
from llm_serving.formats.block_tensor import BlockTensor
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.formats.stored_tensor import Array
from llm_serving.kernels import library

_DTYPES = {"uint16": b"bfloat16", "float16": b"float16", "float32": b"float32"}


def quantize(weight: Array, bits: int, group_size: int | None = None, rotates: bool = False) -> QuantizedTensor:
    """Quantize a weight [out, in] symmetrically to 8 or 4 bits on all cores. The results and the raised errors are the
    same as for `quantize_w8` and `quantize_w4`. The weight is float32, float16, or bfloat16 as uint16 bits. It is not
    copied if it is C-contiguous. Each `group_size` columns of a row share a scale; None means all columns, any other
    value must divide their number. `rotates`: whether rows are rotated first (`QuantizedTensor.rotated`).
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


class _BlockArgs(ctypes.Structure):
    """The C structure `BlockArgs` of csrc/plugin.cc, which describes a segment to pack."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("bits", "zero", "group", "n")),
        *((name, ctypes.c_void_p) for name in ("qvalues", "scales", "minima", "units", "minimum_units")),
    )


class BlockSegments:
    """A weight in GGUF blocks to pack, as segments of consecutive rows. Raise ModelError if it is unsupported."""

    def __init__(self, segments: Sequence[BlockTensor]) -> None:
        self._arrays: list[NDArray[Any]] = []  # keeps the arrays alive while the library reads them
        self._args = (_BlockArgs * len(segments))(*(self._args_of(each) for each in segments))
        self._inputs = segments[0].shape[1]
        self.rows = sum(each.shape[0] for each in segments)
        widths = {each.shape[1] for each in segments}
        self.num_bytes: int = library.load().llm_packed_blocks_bytes(self._args, len(segments), self._inputs)
        if self.num_bytes < 0 or len(widths) > 1:
            given = "; ".join(f"{each.bits} bits, groups of {each.group_size}, {list(each.shape)}" for each in segments)
            rule = "all must have equally many columns, and all but the last a multiple of 16 rows"
            raise ModelError(f"the kernels cannot multiply a weight of these blocks: {rule}. Given: {given}")
        self.columns = self.num_bytes // max(1, self.rows)

    def _args_of(self, tensor: BlockTensor) -> _BlockArgs:
        arrays = (tensor.qvalues, tensor.scales, tensor.minima, tensor.units, tensor.minimum_units)
        addresses = (None if each is None else self._address(each) for each in arrays)
        return _BlockArgs(tensor.bits, tensor.zero, tensor.group_size, tensor.shape[0], *addresses)

    def _address(self, array: NDArray[Any]) -> int:
        self._arrays.append(np.ascontiguousarray(array))
        return self._arrays[-1].ctypes.data

    def pack(self, address: int, dtype: str, *, weight_only: bool = False) -> None:
        """Pack the segments to `address`. Unless `weight_only`, products quantize their inputs of `dtype` to 8 bits."""
        arguments = len(self._args), self._inputs, address, dtype.encode(), self.columns
        library.done(library.load().llm_pack_blocks(weight_only, self._args, *arguments))
