"""The network of the Ascend backend on a CPU: its primitives are answered by our operator library.

The library fixes the order of every sum for a row, so a row's bits do not depend on the batch, on chunks, on the number
of threads or on where its blocks lie.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.ops import CustomRegOp, DataType
from mindspore.ops.auto_generate import gen_ops_prim

from llm_serving.backends.ascend import AscendBackend
from llm_serving.backends.base import Array, BlockMemory
from llm_serving.backends.parameters import copy_blocks_in_memory, parameter_over, to_model_dtype, zeroed_array
from llm_serving.core.step import Int32Array
from llm_serving.errors import ConfigError, KernelError
from llm_serving.kernels import library

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

    float32 goes the same way except for three operations whose primitives refuse it.
    """

    name = "cpu"
    dtypes = ("float32", "bfloat16", "float16")

    def __init__(self, dtype: str) -> None:
        super().__init__(dtype)
        load_plugin()

    def logits(self) -> nn.Cell:
        return Logits()

    def rotary(self, num_heads: int, num_kv_heads: int, head_dim: int) -> nn.Cell:
        if self.dtype == "float32":
            return RotaryFloat32()
        return super().rotary(num_heads, num_kv_heads, head_dim)

    def store_kv(self) -> nn.Cell:
        return StoreKVFloat32() if self.dtype == "float32" else super().store_kv()

    def attention(self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float) -> nn.Cell:
        if self.dtype == "float32":
            return AttentionFloat32(scale)
        return super().attention(num_heads, num_kv_heads, head_dim, scale)

    def linear_weight(self, array: Array, name: str | None = None) -> ms.Parameter:
        _require_dispatch()
        source = np.ascontiguousarray(to_model_dtype(array, self.dtype))
        memory = zeroed_array(source.shape, self.dtype)
        address = memory.ctypes.data
        kernels = library.load()
        kernels.llm_pack_weight(source.ctypes.data, address, self.dtype.encode(), *source.shape)
        parameter = parameter_over(memory, self.dtype, name)
        weakref.finalize(parameter, kernels.llm_release_weight, address)
        return parameter

    def kv_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, name: str = "cache"
    ) -> tuple[ms.Parameter, ms.Parameter]:
        for field, value in (("block_size", block_size), ("head_dim", head_dim)):
            if value % _MULTIPLE != 0:
                raise ConfigError(f"`{field}` must be a multiple of {_MULTIPLE} on {self.name}. Given: {value}")
        return super().kv_cache(num_blocks, block_size, num_kv_heads, head_dim, name)

    def copy_blocks(self, source: BlockMemory, target: BlockMemory, pairs: Int32Array) -> None:
        copy_blocks_in_memory(source, target, pairs)


class Logits(nn.Cell):
    """The sums of the product as they are: `cast_type` is the type MatMul infers for its result."""

    def __init__(self) -> None:
        super().__init__()
        self.matmul = ops.MatMul(transpose_b=True)
        self.matmul.add_prim_attr("cast_type", ms.float32)

    def construct(self, x: ms.Tensor, weight: ms.Tensor) -> ms.Tensor:
        return self.matmul(x, weight)


class RotaryFloat32(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.rotate = gen_ops_prim.RotaryPositionEmbedding()

    def construct(self, q: ms.Tensor, k: ms.Tensor, cos: ms.Tensor, sin: ms.Tensor) -> Any:
        return self.rotate(q, cos, sin, 0), self.rotate(k, cos, sin, 0)


class StoreKVFloat32(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        floats = [DataType.F32_Default] * 4
        self.store = _custom_float32("store_kv_float32", [*floats, DataType.I32_Default])

    def construct(
        self, k: ms.Tensor, v: ms.Tensor, key_cache: ms.Tensor, value_cache: ms.Tensor, slot_mapping: ms.Tensor
    ) -> ms.Tensor:
        return self.store(k, v, key_cache, value_cache, slot_mapping)


class AttentionFloat32(nn.Cell):
    def __init__(self, scale: float) -> None:
        super().__init__()
        floats = [DataType.F32_Default] * 3
        integers = [DataType.I32_Default] * 3
        self.attend = _custom_float32("attention_float32", [*floats, *integers, DataType.F32_Default])
        self.scale = ms.Tensor(np.full(1, scale, dtype=np.float32))

    def construct(
        self,
        q: ms.Tensor,
        key_cache: ms.Tensor,
        value_cache: ms.Tensor,
        block_tables: ms.Tensor,
        query_lens: ms.Tensor,
        context_lens: ms.Tensor,
    ) -> ms.Tensor:
        return self.attend(q, key_cache, value_cache, block_tables, query_lens, context_lens, self.scale)


def _custom_float32(function: str, inputs: list[Any]) -> ops.Custom:
    """A function of the library as an operator whose float32 result has a shape the library infers."""
    register = CustomRegOp(function)
    for index in range(len(inputs)):
        register = register.input(index, f"x{index}")
    register = register.output(0, "y").dtype_format(*inputs, DataType.F32_Default).target("CPU")
    path = f"{library.library_path()}:{function}"
    return ops.Custom(path, None, ms.float32, "aot", reg_info=register.get_op_info())
