"""The network of the Ascend backend on a CPU: its primitives are answered by our operator library.

The library fixes the order of every sum for a row, so a row's bits do not depend on the batch, on chunks, on the number
of threads or on where its blocks lie.
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
from llm_serving.backends.base import Array, BlockMemory
from llm_serving.backends.parameters import (
    copy_blocks_in_memory,
    parameter_over,
    to_model_dtype,
    zeroed_array,
    zeroed_bytes,
)
from llm_serving.core.dtypes import MODEL_DTYPES
from llm_serving.core.step import Int32Array
from llm_serving.errors import ConfigError, KernelError, ModelError
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.kernels import library
from llm_serving.kernels.library import announce_ending
from llm_serving.network.builder import SCALE_BYTES, CacheShape

PLUGIN_VARIABLE = "MS_OP_PLUGIN_PATH"
_MULTIPLE = 16


def load_plugin() -> None:
    """Build the library if needed and name it to MindSpore; to be called before the first operator of the process.

    Raises:
        KernelError: The library cannot be built or loaded, or another operator plugin is named already.
    """
    path = str(library.library_path())
    given = os.environ.get(PLUGIN_VARIABLE)
    if given not in (None, "", path):
        raise KernelError(f"{PLUGIN_VARIABLE} names another operator plugin: {given}")
    os.environ[PLUGIN_VARIABLE] = path
    library.load()


@functools.cache
def _require_dispatch() -> None:
    """Packed weights mean nothing to MindSpore's own products, so make sure that ours are called."""
    kernels = library.load()
    before = kernels.llm_num_calls()
    one = ms.Tensor(np.ones((1, 1), dtype=np.float32))
    gen_ops_prim.AddExt()(one, one, 1).asnumpy()
    if kernels.llm_num_calls() == before:
        raise KernelError("an operator ran before the operator library was named; create the CPU backend first")


class CpuBackend(AscendBackend):
    """Weights are packed into the order the products read them; blocks hold one head after another.

    A whole network may be one operator of the library: MindSpore spends more on a step's operators than a small model
    computes in them.
    """

    name = "cpu"
    dtypes = tuple(MODEL_DTYPES)

    def __init__(self, dtype: str) -> None:
        super().__init__(dtype)
        load_plugin()

    def logits(self) -> nn.Cell:
        return Logits()

    def quantized_logits(self) -> nn.Cell:
        return QuantizedLogits()

    def swiglu(self) -> nn.Cell:
        return Swiglu()

    def program(self) -> nn.Cell | None:
        return Program()

    def linear_weight(self, array: Array, name: str | None = None) -> ms.Parameter:
        return self._packed(array, array.shape, name)

    def expert_weights(self, array: Array, num_experts: int, name: str) -> Sequence[ms.Parameter]:
        """Packed as one, which is those of the experts one after another; MindSpore is shown [experts, K, N]."""
        rows, columns = array.shape
        return [self._packed(array, (num_experts, columns, rows // num_experts), name)]

    def _packed(self, array: Array, shown: tuple[int, ...], name: str | None) -> ms.Parameter:
        _require_dispatch()
        source = np.ascontiguousarray(to_model_dtype(array, self.dtype))
        memory = zeroed_array(source.shape, self.dtype)
        address = memory.ctypes.data
        kernels = library.load()
        library.done(kernels.llm_pack_weight(source.ctypes.data, address, self.dtype.encode(), *source.shape))
        parameter = parameter_over(memory.reshape(shown), self.dtype, name)
        weakref.finalize(parameter, kernels.llm_release_weight, address)
        return parameter

    def coded_weight(self, weight: QuantizedTensor, widened: bool, name: str | None = None) -> ms.Parameter:
        return self._packed_codes(weight, widened, name)

    def _packed_codes(
        self, weight: QuantizedTensor, widened: bool, name: str | None, num_experts: int | None = None
    ) -> ms.Parameter:
        _require_dispatch()
        kernels = library.load()
        (rows, columns), bits = weight.shape, weight.bits
        codes, scales = np.ascontiguousarray(weight.codes), np.ascontiguousarray(weight.scales)
        zeros = None if weight.zeros is None else np.ascontiguousarray(weight.zeros)
        # MindSpore is shown bytes of the codes, as many in each row as come to less than the panels that they fill.
        shown = (rows, columns * bits // 8)
        memory = zeroed_bytes(kernels.llm_packed_codes_bytes(widened, bits, rows, columns))
        address = memory.ctypes.data
        arrays = codes.ctypes.data, scales.ctypes.data, None if zeros is None else zeros.ctypes.data
        form = weight.group_size, address, self.dtype.encode(), rows, columns, shown[1]
        status = library.done(kernels.llm_pack_codes(widened, bits, *arrays, *form))
        if status != 0 or weight.columns is not None:
            rule = "groups of 32, 64, 128, .. inputs in order"
            if not widened:
                rule = f"8 bits in one group or 4 in {rule}, at most 65536 inputs"
            told = f"{bits} bits, groups of {weight.group_size} of {columns} inputs"
            raise ModelError(f"products take weights of {rule}. Given: {told}")
        shape = shown if num_experts is None else (num_experts, shown[1], shown[0] // num_experts)
        parameter = parameter_over(memory[: math.prod(shape)].view(np.int8).reshape(shape), "int8", name)
        weakref.finalize(parameter, kernels.llm_release_weight, address)
        return parameter

    def _codes(self, weight: QuantizedTensor, name: str) -> ms.Parameter:
        return self.coded_weight(weight, False, name)

    def _codes_of_experts(self, weight: QuantizedTensor, num_experts: int, name: str) -> ms.Parameter:
        """Packed as one, as `expert_weights`."""
        return self._packed_codes(weight, False, name, num_experts)

    def kv_cache(
        self, num_blocks: int, block_size: int, shape: CacheShape, name: str = "cache"
    ) -> tuple[ms.Parameter, ms.Parameter]:
        self._check_cache(block_size, shape)
        return super().kv_cache(num_blocks, block_size, shape, name)

    def coded_kv_cache(
        self, num_blocks: int, block_size: int, shape: CacheShape, name: str = "cache"
    ) -> tuple[ms.Parameter, ms.Parameter]:
        self._check_cache(block_size, shape)
        keys, values = (
            _codes((num_blocks, block_size, shape.kv_heads, width + SCALE_BYTES), f"{name}.{part}")
            for part, width in (("key", shape.key_width), ("value", shape.value_width))
        )
        return keys, values

    def copy_blocks(self, source: BlockMemory, target: BlockMemory, pairs: Int32Array) -> None:
        copy_blocks_in_memory(source, target, pairs)

    def _check_cache(self, block_size: int, shape: CacheShape) -> None:
        for field, value in (
            ("block_size", block_size),
            ("head_dim", shape.key_width),
            ("head_dim", shape.value_width),
        ):
            if value % _MULTIPLE != 0:
                raise ConfigError(f"`{field}` must be a multiple of {_MULTIPLE} on {self.name}. Given: {value}")

    def announce_ending(self, tell: Callable[[], None] | None) -> bool:
        announce_ending(tell)
        return True


def _codes(shape: tuple[int, ...], name: str) -> ms.Parameter:
    """Zeroed, with every page at hand."""
    memory = zeroed_bytes(math.prod(shape))
    memory.fill(0)
    return parameter_over(memory.view(np.int8).reshape(shape), "int8", name)


class Logits(nn.Cell):
    """The sums of the product as they are: `cast_type` is the type MatMul infers for its result."""

    def __init__(self) -> None:
        super().__init__()
        self.matmul = ops.MatMul(transpose_b=True)
        self.matmul.add_prim_attr("cast_type", ms.float32)

    def construct(self, x: ms.Tensor, weight: ms.Tensor) -> ms.Tensor:
        return self.matmul(x, weight)


class QuantizedLogits(nn.Cell):
    """Scaled here, since no other type than that of x is inferred for the result of QuantBatchMatmul."""

    def __init__(self) -> None:
        super().__init__()
        self.quantize = gen_ops_prim.DynamicQuantExt()
        self.sums, self.mul, self.reshape = Logits(), ops.Mul(), ops.Reshape()

    def construct(self, x: ms.Tensor, codes: ms.Tensor, scales: ms.Tensor) -> ms.Tensor:
        rows, row_scales = self.quantize(x, None)
        return self.mul(self.mul(self.sums(rows, codes), scales), self.reshape(row_scales, (-1, 1)))


class Swiglu(nn.Cell):
    """One operator of the library, which rounds once, as a program does."""

    def __init__(self) -> None:
        super().__init__()
        self.primitive = gen_ops_prim.Swiglu()

    def construct(self, gate_up: ms.Tensor) -> ms.Tensor:
        return self.primitive(gate_up, -1)


class Program(nn.Cell):
    """`Backend.program`: an operator whose shapes are always the same, with one parameter.

    Around one whose shapes may change MindSpore takes twenty times as long (csrc/addressed.h).
    """

    def __init__(self) -> None:
        super().__init__()
        register = CustomRegOp("program").input(0, "table").output(0, "done").target("CPU")
        register = register.dtype_format(DataType.I64_Default, DataType.F32_Default)
        path = f"{library.library_path()}:program"
        self.run = ops.Custom(path, (1,), ms.float32, "aot", reg_info=register.get_op_info())

    def construct(self, table: ms.Tensor) -> ms.Tensor:
        return self.run(table)
