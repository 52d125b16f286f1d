"""The operations of a decoder as the primitives an Ascend device has.

The same Cells serve a CPU, where an operator library answers these primitives (`cpu.py`). The graph they form exports
to MINDIR on any machine.

Sums over the devices that compute a replica together, by MindSpore's collectives (HCCL, MCCL).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.common.np_dtype import bfloat16 as numpy_bfloat16
from mindspore.communication import get_group_size
from mindspore.ops.auto_generate import gen_ops_prim

from llm_serving.backends import ascend_experts
from llm_serving.backends.base import Array, AttentionShape, BlockMemory, model_dtype
from llm_serving.backends.parameters import (
    float32_parameter,
    parameter_over,
    to_model_dtype,
    zeroed_array,
    zeroed_bytes,
    zeroed_parameter,
)
from llm_serving.core.dtypes import MODEL_DTYPES
from llm_serving.core.step import Int32Array
from llm_serving.errors import ConfigError, ModelError
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.network.builder import CacheShape, Network
from llm_serving.network.operations import rounded_to
from llm_serving.network.quantization import lacking


class OrderedSum(nn.Cell):
    """(x [T, N]) -> the sum of x over all ranks, in their order, in float32 and rounded once

    AllReduce passes pieces around a ring: which rank an element is begun at depends on how many there are, and so on
    the batch. Here every rank gathers all parts and adds them up for itself, as `kernels/csrc/ranks.h` does. Without a
    group of processes, as when a graph is exported, the environment's RANK_SIZE says how many ranks there are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gather = ops.AllGather()
        self.num_ranks = get_group_size()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        parts = self.gather(x.astype(ms.float32)).reshape(self.num_ranks, -1, x.shape[1])
        total = parts[0]
        for rank in range(1, self.num_ranks):
            total = total + parts[rank]
        return total.astype(x.dtype)


class AnySum(nn.Cell):
    """(x [T, N]) -> the sum of x over all ranks, in an order that may depend on T"""

    def __init__(self) -> None:
        super().__init__()
        self.reduce = ops.AllReduce(ops.ReduceOp.SUM)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.reduce(x)


_ROTATE_HALF = 2
_MASK_SIZE = 128
_MASKED = -10000.0


class AscendBackend:
    """Ascend primitives; weights and caches in row-major order."""

    name = "ascend"
    dtypes = tuple(dtype.name for dtype in MODEL_DTYPES.values() if dtype.on_ascend)

    def __init__(self, dtype: str) -> None:
        self.activation_dtype = model_dtype(dtype)
        self.dtype = dtype
        if dtype not in self.dtypes:
            raise ConfigError(f"`model_dtype` on {self.name} must be one of {', '.join(self.dtypes)}. Given: {dtype}")

    def lacking(self, network: Network, num_positions: int) -> str | None:
        return lacking(network, num_positions)

    def embedding(self) -> nn.Cell:
        return Embedding()

    def rms_norm(self, eps: float) -> nn.Cell:
        return RmsNorm(eps)

    def add_rms_norm(self, eps: float) -> nn.Cell:
        return AddRmsNorm(eps)

    def linear(self) -> nn.Cell:
        return Linear()

    def logits(self) -> nn.Cell:
        return Logits()

    def quantized_embedding(self) -> nn.Cell:
        return QuantizedEmbedding(self.activation_dtype)

    def quantized_linear(self) -> nn.Cell:
        return QuantizedLinear(self.activation_dtype)

    def quantized_logits(self) -> nn.Cell:
        return QuantizedLogits(self.activation_dtype)

    def route(self, attributes: Mapping[str, Any], num_experts: int, correction: ms.Parameter | None = None) -> nn.Cell:
        return ascend_experts.Route(attributes)

    def experts(self, num_experts: int) -> nn.Cell:
        return ascend_experts.Experts(num_experts, self.swiglu())

    def quantized_experts(self, num_experts: int) -> nn.Cell:
        return ascend_experts.QuantizedExperts(num_experts, self.swiglu(), self.activation_dtype)

    def split(self, widths: Sequence[int]) -> nn.Cell:
        return Split(widths)

    def rotary(self, head_dim: int) -> nn.Cell:
        return Rotary()

    def store_kv(self) -> nn.Cell:
        return StoreKV()

    def lengths(self) -> nn.Cell:
        return HostLengths()

    def seen(self, max_positions: int, block_size: int) -> nn.Cell:
        return CausalMask(max_positions, block_size, self.activation_dtype)

    def paged_attention(self, shape: AttentionShape, slopes: ms.Parameter | None = None) -> nn.Cell:
        return PagedAttention(shape.num_heads, shape.num_kv_heads, shape.scale)

    def prompt_attention(self, shape: AttentionShape) -> nn.Cell | None:
        return PromptAttention(shape.num_heads, shape.scale, prompt_mask(self.activation_dtype))

    def program(self) -> nn.Cell | None:
        return None

    def rounded(self, number: float) -> float:
        return float(rounded_to(np.float32(number), self.dtype))

    def swiglu(self) -> nn.Cell:
        return Swiglu()

    def add(self) -> nn.Cell:
        return Add()

    def all_reduce(self) -> nn.Cell:
        return OrderedSum()

    def linear_weight(self, array: Array, name: str | None = None) -> ms.Parameter:
        return self._copy(array, name)

    def expert_weights(self, array: Array, num_experts: int, name: str) -> Sequence[ms.Parameter]:
        """One of [experts, K, N]: GroupedMatmulV4 takes no transposed weights."""
        of_experts = array.reshape(num_experts, -1, array.shape[1])
        return [self._copy(of_experts.transpose(0, 2, 1), name)]

    def coded_weight(self, weight: QuantizedTensor, widened: bool, name: str | None = None) -> ms.Parameter:
        raise ModelError(f"the operations of {self.name} run no programs, which such weights are for")

    def quantized_weight(self, weight: QuantizedTensor, name: str) -> tuple[ms.Parameter, ms.Parameter]:
        _check_codes("QuantBatchMatmul", weight, name)
        return self._codes(weight, f"{name}.codes"), float32_parameter(weight.scales.reshape(-1), f"{name}.scales")

    def quantized_expert_weights(
        self, weight: QuantizedTensor, num_experts: int, name: str
    ) -> tuple[ms.Parameter, ms.Parameter]:
        _check_codes("GroupedMatmulV4", weight, name)
        codes = self._codes_of_experts(weight, num_experts, f"{name}.codes")
        return codes, float32_parameter(weight.scales.reshape(num_experts, -1), f"{name}.scales")

    def vector(self, *arrays: Array, name: str | None = None) -> ms.Parameter:
        return self._copy(np.concatenate([to_model_dtype(array, self.dtype) for array in arrays]), name)

    def numbers(self, array: Array, name: str | None = None) -> ms.Parameter:
        return float32_parameter(array, name)

    def table(self, array: Array, name: str | None = None) -> ms.Parameter:
        return self._copy(array, name)

    def kv_cache(
        self, num_blocks: int, block_size: int, shape: CacheShape, name: str = "cache"
    ) -> tuple[ms.Parameter, ms.Parameter]:
        shapes = {"key": shape.key_width, "value": shape.value_width}
        keys, values = (
            zeroed_parameter((num_blocks, block_size, shape.kv_heads, width), self.dtype, f"{name}.{part}")
            for part, width in shapes.items()
        )
        return keys, values

    def coded_kv_cache(
        self, num_blocks: int, block_size: int, shape: CacheShape, name: str = "cache"
    ) -> tuple[ms.Parameter, ms.Parameter]:
        raise ModelError(f"the operations of {self.name} attend to no keys in 8 bits; kernels: program does")

    def copy_blocks(self, source: BlockMemory, target: BlockMemory, pairs: Int32Array) -> None:
        for batch in _independent(pairs, source is target):
            blocks = self._read_blocks(source, batch[:, 0])
            if isinstance(target, ms.Parameter):
                ops.ScatterUpdate()(target, _index(batch[:, 1]), blocks)
            else:
                target[batch[:, 1]] = blocks.asnumpy().view(target.dtype)

    def announce_ending(self, tell: Callable[[], None] | None) -> bool:
        return False

    def _read_blocks(self, source: BlockMemory, block_ids: Int32Array) -> ms.Tensor:
        """[n, ...] on the device."""
        if isinstance(source, ms.Parameter):
            return gen_ops_prim.Gather()(source, _index(block_ids), 0)
        blocks = source[block_ids]
        return ms.Tensor.from_numpy(blocks.view(numpy_bfloat16) if self.dtype == "bfloat16" else blocks)

    def _codes(self, weight: QuantizedTensor, name: str) -> ms.Parameter:
        return _copy_of_codes(weight.codes, name)

    def _codes_of_experts(self, weight: QuantizedTensor, num_experts: int, name: str) -> ms.Parameter:
        of_experts = weight.codes.reshape(num_experts, -1, weight.shape[1])
        return _copy_of_codes(of_experts.transpose(0, 2, 1), name)

    def _copy(self, array: Array, name: str | None) -> ms.Parameter:
        memory = zeroed_array(array.shape, self.dtype)
        memory[...] = to_model_dtype(array, self.dtype)
        return parameter_over(memory, self.dtype, name)


class FastAscendBackend(AscendBackend):
    """As `AscendBackend`, for `exactness: fast`: ranks add up as the device likes to."""

    name = "ascend_fast"

    def all_reduce(self) -> nn.Cell:
        return AnySum()


def _check_codes(primitive: str, weight: QuantizedTensor, name: str) -> None:
    if weight.bits != 8 or weight.num_groups != 1 or weight.columns is not None:
        raise ModelError(f"{primitive} takes 8 bits in one group. Given: {weight.bits} bits, {name}")


def _copy_of_codes(codes: Array, name: str) -> ms.Parameter:
    memory = zeroed_bytes(codes.size).view(np.int8).reshape(codes.shape)
    memory[...] = codes
    return parameter_over(memory, "int8", name)


def _index(block_ids: Int32Array) -> ms.Tensor:
    return ms.Tensor.from_numpy(np.ascontiguousarray(block_ids))


def _independent(pairs: Int32Array, same_memory: bool) -> Iterator[Int32Array]:
    """Cuts copies [n, 2] into batches that can be read all together and then written in any order.

    No batch writes a block twice, nor reads a block that it has written before.
    """
    start, written = 0, set[int]()
    for index, (source, target) in enumerate(pairs.tolist()):
        if target in written or (same_memory and source in written):
            yield pairs[start:index]
            start = index
            written.clear()
        written.add(target)
    if start < len(pairs):
        yield pairs[start:]


class Embedding(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.gather = gen_ops_prim.Gather()

    def construct(self, token_ids: ms.Tensor, table: ms.Tensor) -> ms.Tensor:
        return self.gather(table, token_ids, 0)


class RmsNorm(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.rms_norm = gen_ops_prim.RmsNorm(eps)

    def construct(self, x: ms.Tensor, gamma: ms.Tensor) -> ms.Tensor:
        return self.rms_norm(x, gamma)[0]


class AddRmsNorm(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.add_rms_norm = gen_ops_prim.AddRmsNorm()
        self.eps = eps

    def construct(self, x: ms.Tensor, y: ms.Tensor, gamma: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor]:
        normed, _, total = self.add_rms_norm(x, y, gamma, self.eps)
        return normed, total


class Linear(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(self, x: ms.Tensor, weight: ms.Tensor) -> ms.Tensor:
        return self.matmul(x, weight)


class Logits(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.matmul = ops.MatMul(transpose_b=True)
        self.cast = ops.Cast()

    def construct(self, x: ms.Tensor, weight: ms.Tensor) -> ms.Tensor:
        return self.cast(self.matmul(x, weight), ms.float32)


class QuantizedLinear(nn.Cell):
    """Sums of products of codes are whole numbers, so that their order is free on every device."""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.quantize = gen_ops_prim.DynamicQuantExt()
        self.matmul = gen_ops_prim.QuantBatchMatmul(False, True, dtype)

    def construct(self, x: ms.Tensor, codes: ms.Tensor, scales: ms.Tensor) -> ms.Tensor:
        rows, row_scales = self.quantize(x, None)
        return self.matmul(rows, codes, scales, None, None, row_scales)


class QuantizedLogits(nn.Cell):
    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.linear = QuantizedLinear(dtype)
        self.cast = ops.Cast()

    def construct(self, x: ms.Tensor, codes: ms.Tensor, scales: ms.Tensor) -> ms.Tensor:
        return self.cast(self.linear(x, codes, scales), ms.float32)


class QuantizedEmbedding(nn.Cell):
    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.gather, self.cast, self.mul = gen_ops_prim.Gather(), ops.Cast(), ops.Mul()
        self.reshape = ops.Reshape()
        self.dtype = dtype

    def construct(self, token_ids: ms.Tensor, codes: ms.Tensor, scales: ms.Tensor) -> ms.Tensor:
        rows = self.cast(self.gather(codes, token_ids, 0), ms.float32)
        of_rows = self.reshape(self.gather(scales, token_ids, 0), (-1, 1))
        return self.cast(self.mul(rows, of_rows), self.dtype)


class Rotary(nn.Cell):
    """Cosines and sines have one row for each token, so the lengths the primitive also takes say nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.rotate = gen_ops_prim.ApplyRotaryPosEmb(_ROTATE_HALF)

    def construct(self, q: ms.Tensor, k: ms.Tensor, cos: ms.Tensor, sin: ms.Tensor, context_lens: ms.Tensor) -> Any:
        return self.rotate(q, k, cos, sin, context_lens)


class HostLengths(nn.Cell):
    """The device's attention plans its work on the host, which reads the lengths there."""

    def construct(self, lengths: ms.Tensor) -> ms.Tensor:
        return ops.move_to(lengths, "CPU")


class CausalMask(nn.Cell):
    """[T, keys], added to scores: 0 up to a row's own position, -10,000 behind it.

    It has a column for every token of the widest block table. Where it is made, not gathered from a table of all
    positions, no memory grows with the square of the context.
    """

    def __init__(self, max_positions: int, block_size: int, dtype: Any) -> None:
        super().__init__()
        num_keys = -(-max_positions // block_size) * block_size
        self.keys = ms.Tensor(np.arange(num_keys, dtype=np.int32).reshape(1, -1))
        self.block_size = block_size
        self.dtype = dtype
        self.masked = ms.Tensor(np.float32(_MASKED))
        self.slice, self.greater, self.cast, self.mul = ops.StridedSlice(), ops.Greater(), ops.Cast(), ops.Mul()
        self.reshape, self.shape = ops.Reshape(), ops.Shape()

    def construct(self, positions: ms.Tensor, block_tables: ms.Tensor) -> ms.Tensor:
        num_keys = self.shape(block_tables)[1] * self.block_size
        keys = self.slice(self.keys, (0, 0), (1, num_keys), (1, 1))
        hidden = self.greater(keys, self.reshape(positions, (-1, 1)))
        return self.cast(self.mul(self.cast(hidden, ms.float32), self.masked), self.dtype)


class StoreKV(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.reshape_and_cache = gen_ops_prim.ReshapeAndCache()

    def construct(
        self, k: ms.Tensor, v: ms.Tensor, key_cache: ms.Tensor, value_cache: ms.Tensor, slot_mapping: ms.Tensor
    ) -> ms.Tensor:
        return self.reshape_and_cache(k, v, key_cache, value_cache, slot_mapping)


class PagedAttention(nn.Cell):
    def __init__(self, num_heads: int, num_kv_heads: int, scale: float) -> None:
        super().__init__()
        self.paged_attention = gen_ops_prim.PagedAttention(num_heads, scale, num_kv_heads)

    def construct(
        self,
        q: ms.Tensor,
        key_cache: ms.Tensor,
        value_cache: ms.Tensor,
        block_tables: ms.Tensor,
        query_lens: ms.Tensor,
        context_lens: ms.Tensor,
        mask: ms.Tensor,
    ) -> ms.Tensor:
        return self.paged_attention(
            q, key_cache, value_cache, block_tables, context_lens, None, None, mask, query_lens, None
        )


class PromptAttention(nn.Cell):
    def __init__(self, num_heads: int, scale: float, mask: ms.Tensor) -> None:
        super().__init__()
        self.flash = gen_ops_prim.FlashAttentionScore(num_heads, scale_value=scale, input_layout="TH", sparse_mode=0)
        self.mask = mask

    def construct(
        self, q: ms.Tensor, k: ms.Tensor, v: ms.Tensor, query_lens: ms.Tensor, context_lens: ms.Tensor
    ) -> ms.Tensor:
        lens = ops.cast(query_lens, ms.int64), ops.cast(context_lens, ms.int64)
        return self.flash(q, k, v, None, None, None, self.mask, None, lens[0], lens[1])[3]


def prompt_mask(dtype: Any) -> ms.Tensor:
    """What FlashAttentionScore in layout TH lays along the diagonal: [128, 128], set above it.

    The device multiplies a bfloat16 mask by a large negative number itself and adds a float16 mask as it is.
    """
    above = np.triu(np.ones((_MASK_SIZE, _MASK_SIZE), np.float32), 1)
    return ms.Tensor(above if dtype == ms.bfloat16 else above * _MASKED).astype(dtype)


class Swiglu(nn.Cell):
    """silu(gate) * up as split, SiLU and multiply.

    The device's kernel of the primitive `Swiglu` reads the attribute `FusionType`, which only MindSpore's fusion pass
    sets: the pass replaces these three operations by the primitive. A graph that calls the primitive itself is refused
    by the device's kernel library.
    """

    def __init__(self) -> None:
        super().__init__()
        self.split, self.silu, self.mul = gen_ops_prim.SplitWithSize(), gen_ops_prim.SiLU(), ops.Mul()
        self.shape = ops.Shape()

    def construct(self, gate_up: ms.Tensor) -> ms.Tensor:
        half = self.shape(gate_up)[-1] // 2
        gate, up = self.split(gate_up, (half, half), -1)
        return self.mul(self.silu(gate), up)


class Add(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.primitive = gen_ops_prim.AddExt()

    def construct(self, a: ms.Tensor, b: ms.Tensor) -> ms.Tensor:
        return self.primitive(a, b, 1)


class Split(nn.Cell):
    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = tuple(sizes)
        self.primitive = gen_ops_prim.SplitWithSize()

    def construct(self, x: ms.Tensor) -> Any:
        return self.primitive(x, self.sizes, -1)
