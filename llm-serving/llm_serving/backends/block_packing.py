"""Packs weights in GGUF blocks into the order in which the kernels read them (csrc/packed_blocks.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llm_serving.errors import ModelError
from llm_serving.formats.block_tensor import BlockTensor
from llm_serving.kernels import library


class _BlockArgs(ctypes.Structure):
    """The C structure `BlockArgs` of csrc/plugin.cc, which describes a segment to pack."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("bits", "zero", "group", "n")),
        *((name, ctypes.c_void_p) for name in ("qvalues", "scales", "minima", "units", "minimum_units")),
    )


class BlockSegments:
    """The segments of one weight, as arguments of the operator library. MindSpore sees the packed weight as int8 [rows,
    columns].

    Raise ModelError if no kernel supports such a weight, KernelError if the library cannot be built or loaded.
    """

    def __init__(self, segments: Sequence[BlockTensor]) -> None:
        self._arrays: list[NDArray[Any]] = []  # keeps the arrays alive while the library reads them
        self._args = (_BlockArgs * len(segments))(*(self._args_of(each) for each in segments))
        self._inputs = segments[0].shape[1]
        self.rows = sum(each.shape[0] for each in segments)
        widths = {each.shape[1] for each in segments}
        self.num_bytes: int = library.load().llm_packed_blocks_bytes(self._args, len(segments), self._inputs)
        if self.num_bytes < 0 or len(widths) > 1:
            given = "; ".join(f"{each.bits} bits, groups of {each.group_size}, {list(each.shape)}" for each in segments)
            rule = "all need the same columns, and all but the last a multiple of 16 rows"
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
        """Pack the segments into `num_bytes` bytes at an address, as a weight for activations of a dtype.

        Without `weight_only`, products quantize the activations to 8 bits.
        """
        arguments = len(self._args), self._inputs, address, dtype.encode(), self.columns
        library.done(library.load().llm_pack_blocks(weight_only, self._args, *arguments))
