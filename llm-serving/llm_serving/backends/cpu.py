"""The CPU backend: it runs the Ascend backend's Cells, whose primitives the operator library implements.

The library fixes the order of every sum of a row, so the bits of a row do not depend on the batch, on chunking, on the
number of threads or on the location of its blocks.
"""

from __future__ import annotations

import functools
import math
import os
import weakref
from collections.abc import Callable, Sequence

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.ops import CustomRegOp, DataType
from mindspore.ops.auto_generate import gen_ops_prim

from llm_serving.backends.ascend import AscendBackend
from llm_serving.backends.base import Array
from llm_serving.backends.parameters import (
    copy_blocks_in_memory,
    parameter_over,
    to_model_dtype,
    weight_memory,
    zeroed_array,
    zeroed_bytes,
)
from llm_serving.backends.token_drawing import TokenDrawing
from llm_serving.backends.weight_packing import BlockSegments
from llm_serving.core.dtypes import MODEL_DTYPES
from llm_serving.errors import ConfigError, KernelError, ModelError, NotFiniteError
from llm_serving.formats.block_tensor import BlockTensor
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.kernels import library
from llm_serving.kernels.library import announce_ending
from llm_serving.network.caches import INT8_SCALE_BYTES, CacheShape, StateShape
from llm_serving.network.weights import RowStack

PLUGIN_VARIABLE = "MS_OP_PLUGIN_PATH"
_MULTIPLE = 16


def load_plugin() -> None:
    """Build the operator library if needed, and register it with MindSpore, before the first operator runs."""
    path = str(library.loaded_path())
    given = os.environ.get(PLUGIN_VARIABLE)
    if given not in (None, "", path):
        raise KernelError(f"{PLUGIN_VARIABLE} must be unset or {path}, this server's operator plugin. Given: {given}")
    os.environ[PLUGIN_VARIABLE] = path
    library.load()


@functools.cache
def _require_dispatch() -> None:
    """Raise KernelError if MindSpore does not use the library's matrix products; its own cannot read packed weights."""
    kernels = library.load()
    before = kernels.llm_num_calls()
    one = ms.Tensor(np.ones((1, 1), dtype=np.float32))
    gen_ops_prim.AddExt()(one, one, 1).asnumpy()
    if kernels.llm_num_calls() == before:
        raise KernelError("an operator ran before the operator library was registered; create the CPU backend first")


class CpuLogits(nn.Cell):
    """A matrix product for logits. Due to `cast_type`, its float32 sums are not rounded to the model dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.matmul = ops.MatMul(transpose_b=True)
        self.matmul.add_prim_attr("cast_type", ms.float32)

    def construct(self, x: ms.Tensor, weight: ms.Tensor) -> ms.Tensor:
        return self.matmul(x, weight)


class CpuQuantizedLogits(nn.Cell):
    """Scales integer sums to float32 logits. MindSpore's QuantBatchMatmul would return them in the type of x."""

    def __init__(self) -> None:
        super().__init__()
        self.quantize = gen_ops_prim.DynamicQuantExt()
        self.sums, self.mul, self.reshape = CpuLogits(), ops.Mul(), ops.Reshape()

    def construct(self, x: ms.Tensor, qvalues: ms.Tensor, scales: ms.Tensor) -> ms.Tensor:
        rows, row_scales = self.quantize(x, None)
        return self.mul(self.mul(self.sums(rows, qvalues), scales), self.reshape(row_scales, (-1, 1)))


class CpuColumns(nn.Cell):
    """Returns the columns `start` to `end` - 1. MindSpore lacks the primitive of `AscendColumns` on a CPU."""

    def __init__(self, start: int, end: int | None = None) -> None:
        super().__init__()
        self.slice, self.first, self.size = ops.Slice(), (0, start), (-1, -1 if end is None else end - start)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.slice(x, self.first, self.size)


class CpuCumulativeSum(nn.Cell):
    """Replaces `AscendCumulativeSum`, whose primitive MindSpore lacks on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.cumsum, self.cast = ops.CumSum(), ops.Cast()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.cumsum(self.cast(x, ms.int32), -1)


class CpuLargestValues(nn.Cell):
    """Replaces `AscendLargestValues`, whose primitive MindSpore lacks on a CPU."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.top, self.count = ops.TopK(), count

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.top(x, self.count)[0]


class CpuSwiglu(nn.Cell):
    """silu(gate) * up as one operator of the library. It rounds only once, as `CpuProgram` does."""

    def __init__(self) -> None:
        super().__init__()
        self.primitive = gen_ops_prim.Swiglu()

    def construct(self, gate_up: ms.Tensor) -> ms.Tensor:
        return self.primitive(gate_up, -1)


class CpuProgram(nn.Cell):
    """The operator of `Backend.program`. Its arguments have fixed shapes: MindSpore is slow if shapes are dynamic."""

    def __init__(self) -> None:
        super().__init__()
        register = CustomRegOp("program").input(0, "table").output(0, "done").target("CPU")
        register = register.dtype_format(DataType.I64_Default, DataType.F32_Default)
        path = f"{library.loaded_path()}:program"
        self.run = ops.Custom(path, (1,), ms.float32, "aot", reg_info=register.get_op_info())

    def construct(self, table: ms.Tensor) -> ms.Tensor:
        return self.run(table)


class CpuBackend(AscendBackend):
    """Ascend's Cells on a CPU, with packed weights, and KV blocks stored head after head. Usually one operator runs the
    whole network (`network.program`), because MindSpore's overhead per operator exceeds a small model's computation.
    """

    name = "cpu"
    dtypes = tuple(MODEL_DTYPES)
    swiglu = CpuSwiglu
    columns = CpuColumns
    program = CpuProgram
    logits = CpuLogits
    quantized_logits = CpuQuantizedLogits
    copy_blocks = staticmethod(copy_blocks_in_memory)

    def __init__(self, dtype: str) -> None:
        super().__init__(dtype)
        load_plugin()

    def token_drawing(self, vocab_size: int, num_candidates: int) -> nn.Cell | None:
        return TokenDrawing(vocab_size, CpuCumulativeSum(), CpuLargestValues, num_candidates)

    def linear_weight(self, array: Array, name: str | None = None) -> ms.Parameter:
        return self._packed(self._rows(array), None, name)

    def expert_weights(self, array: Array, num_experts: int, name: str) -> Sequence[ms.Parameter]:
        return [self._packed(self._rows(array), num_experts, name)]

    def packed_rows(self, rows: RowStack, num_experts: int | None, name: str) -> ms.Parameter | None:
        if rows.dtype != np.dtype(MODEL_DTYPES[self.dtype].numpy):
            return None
        return self._packed(rows, num_experts, name)

    def _rows(self, array: Array) -> RowStack:
        return RowStack([np.ascontiguousarray(to_model_dtype(array, self.dtype))])

    def _packed(self, rows: RowStack, num_experts: int | None, name: str | None) -> ms.Parameter:
        """Return a matrix [N, K], packed for the kernels. Its nominal shape is [N, K], or [experts, K, N]."""
        _require_dispatch()
        num_rows, columns = rows.shape
        memory = weight_memory(num_rows * columns * rows.dtype.itemsize).view(rows.dtype)
        address = memory.ctypes.data
        kernels = library.load()
        sources, zeros = rows.addresses()
        form = address, self.dtype.encode(), num_rows, columns
        if library.done(kernels.llm_pack_weight(sources.ctypes.data, *form)) != 0:
            kernels.llm_release_weight(address)
            raise NotFiniteError("a weight must hold finite numbers only")
        del zeros
        shown = rows.shape if num_experts is None else (num_experts, columns, num_rows // num_experts)
        return _released_at_end(parameter_over(memory.reshape(shown), self.dtype, name), address)

    def block_weight(self, segments: Sequence[BlockTensor], weight_only: bool, name: str | None = None) -> ms.Parameter:
        _require_dispatch()
        packed = BlockSegments(segments)
        memory = weight_memory(packed.num_bytes)
        address = memory.ctypes.data
        packed.pack(address, self.dtype, weight_only=weight_only)
        return _released_at_end(_int8_parameter(memory, (packed.rows, packed.columns), name), address)

    def packed_quantized_weight(
        self, weight: QuantizedTensor, weight_only: bool, name: str | None = None, num_experts: int | None = None
    ) -> ms.Parameter:
        _require_dispatch()
        kernels = library.load()
        (rows, columns), bits = weight.shape, weight.bits
        qvalues, scales = np.ascontiguousarray(weight.qvalues), np.ascontiguousarray(weight.scales)
        zeros = None if weight.zeros is None else np.ascontiguousarray(weight.zeros)
        # For MindSpore, the Parameter has the bytes of the quantized values without the padding of their panels.
        shown = (rows, columns * bits // 8)
        memory = weight_memory(kernels.llm_packed_qvalues_bytes(weight_only, bits, rows, columns))
        address = memory.ctypes.data
        arrays = qvalues.ctypes.data, scales.ctypes.data, None if zeros is None else zeros.ctypes.data
        form = weight.group_size, weight.rotated, address, self.dtype.encode(), rows, columns, shown[1]
        status = library.done(kernels.llm_pack_qvalues(weight_only, bits, *arrays, *form))
        if status != 0 or weight.g_idx is not None:
            rule = "groups of 32, 64, 128, ... consecutive inputs"
            if not weight_only:
                rule = f"8 bits in one group or 4 in {rule}, at most 65536 inputs"
            given = f"{bits} bits, groups of {weight.group_size} of {columns} inputs"
            raise ModelError(f"quantized weights must have {rule}. Given: {given}")
        shape = shown if num_experts is None else (num_experts, shown[1], shown[0] // num_experts)
        return _released_at_end(_int8_parameter(memory, shape, name), address)

    def _quantized_values(self, weight: QuantizedTensor, name: str) -> ms.Parameter:
        return self.packed_quantized_weight(weight, False, name)

    def _expert_qvalues(self, weight: QuantizedTensor, num_experts: int, name: str) -> ms.Parameter:
        return self.packed_quantized_weight(weight, False, name, num_experts)

    def kv_cache(
        self, num_blocks: int, block_size: int, shape: CacheShape, name: str = "cache"
    ) -> tuple[ms.Parameter, ms.Parameter]:
        self._check_cache(block_size, shape)
        return super().kv_cache(num_blocks, block_size, shape, name)

    def int8_kv_cache(
        self, num_blocks: int, block_size: int, shape: CacheShape, name: str = "cache"
    ) -> tuple[ms.Parameter, ms.Parameter]:
        self._check_cache(block_size, shape)
        sizes = num_blocks, block_size, shape.kv_heads
        keys = _zeroed_int8((*sizes, shape.key_width + INT8_SCALE_BYTES), f"{name}.key")
        return keys, _zeroed_int8((*sizes, shape.value_width + INT8_SCALE_BYTES), f"{name}.value")

    def states(self, num_slots: int, shape: StateShape, name: str) -> ms.Parameter:
        return parameter_over(zeroed_array((num_slots, *shape.shape), "float32"), "float32", name)

    def _check_cache(self, block_size: int, shape: CacheShape) -> None:
        sizes = ("block_size", block_size), ("head_dim", shape.key_width), ("head_dim", shape.value_width)
        for field, value in sizes:
            if value % _MULTIPLE != 0:
                raise ConfigError(f"`{field}` must be a multiple of {_MULTIPLE} on {self.name}. Given: {value}")

    def announce_ending(self, callback: Callable[[], None] | None) -> bool:
        announce_ending(callback)
        return True


def _zeroed_int8(shape: tuple[int, ...], name: str) -> ms.Parameter:
    return _int8_parameter(zeroed_bytes(math.prod(shape)), shape, name)


def _int8_parameter(memory: Array, shape: tuple[int, ...], name: str | None) -> ms.Parameter:
    """Return a Parameter over the first bytes of `memory`."""
    return parameter_over(memory[: math.prod(shape)].view(np.int8).reshape(shape), "int8", name)


def _released_at_end(parameter: ms.Parameter, address: int) -> ms.Parameter:
    """Make the library forget the packed weight at `address` when the Parameter ends."""
    weakref.finalize(parameter, library.load().llm_release_weight, address)
    return parameter
