"""The backend for Ascend devices, which composes a decoder from Ascend primitives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.ops.auto_generate import gen_ops_prim

from llm_serving.backends import ascend_cells as cells
from llm_serving.backends import ascend_experts
from llm_serving.backends.base import Array, AttentionShape, Backend, BlockMemory, model_dtype
from llm_serving.backends.parameters import (
    float32_parameter,
    host_tensor,
    parameter_over,
    to_model_dtype,
    zeroed_array,
    zeroed_bytes,
    zeroed_parameter,
)
from llm_serving.backends.token_drawing import AscendCumulativeSum, AscendLargestValues, TokenDrawing
from llm_serving.core.dtypes import MODEL_DTYPES
from llm_serving.core.step import Int32Array
from llm_serving.errors import ConfigError, ModelError
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.network.builder import Network
from llm_serving.network.caches import CacheShape
from llm_serving.network.quantization import unsupported_by_ascend

_ROTATE_HALF = 2


class AscendBackend(Backend):
    """A backend of Ascend primitives. Weights and KV caches are in row-major order."""

    name = "ascend"
    dtypes = tuple(dtype.name for dtype in MODEL_DTYPES.values() if dtype.on_ascend)
    embedding = cells.AscendEmbedding
    rms_norm = cells.AscendRmsNorm
    add_rms_norm = cells.AscendAddRmsNorm
    split = cells.AscendSplit
    store_kv = gen_ops_prim.ReshapeAndCache
    largest_logits = cells.AscendLargestLogits
    columns = cells.AscendColumns
    swiglu = cells.AscendSwiglu
    add = cells.AscendAdd
    all_reduce = cells.AscendOrderedSum

    def __init__(self, dtype: str) -> None:
        self.activation_dtype = model_dtype(dtype)
        self.dtype = dtype
        if dtype not in self.dtypes:
            raise ConfigError(f"`model_dtype` on {self.name} must be one of {', '.join(self.dtypes)}. Given: {dtype}")

    def unsupported(self, network: Network, num_positions: int) -> str | None:
        return unsupported_by_ascend(network, num_positions)

    def linear(self) -> nn.Cell:
        return ops.MatMul(transpose_b=True)

    def logits(self) -> nn.Cell:
        return cells.AscendLogits()

    def quantized_embedding(self) -> nn.Cell:
        return cells.AscendQuantizedEmbedding(self.activation_dtype)

    def quantized_linear(self) -> nn.Cell:
        return cells.AscendQuantizedLinear(self.activation_dtype)

    def quantized_logits(self) -> nn.Cell:
        return cells.AscendQuantizedLogits(self.activation_dtype)

    def route(self, attributes: Mapping[str, Any], num_experts: int, correction: ms.Parameter | None = None) -> nn.Cell:
        return ascend_experts.AscendRouter(attributes)

    def experts(self, num_experts: int) -> nn.Cell:
        return ascend_experts.AscendExperts(num_experts, self.swiglu())

    def quantized_experts(self, num_experts: int) -> nn.Cell:
        return ascend_experts.AscendExperts(num_experts, self.swiglu(), self.activation_dtype)

    def rotary(self, head_dim: int) -> nn.Cell:
        return gen_ops_prim.ApplyRotaryPosEmb(_ROTATE_HALF)

    def attention_mask(self, max_positions: int, block_size: int) -> nn.Cell:
        return cells.AscendCausalMask(max_positions, block_size, self.activation_dtype)

    def paged_attention(self, shape: AttentionShape, slopes: ms.Parameter | None = None) -> nn.Cell:
        return cells.AscendPagedAttention(shape.num_heads, shape.num_kv_heads, shape.scale)

    def token_drawing(self, vocab_size: int, num_candidates: int) -> nn.Cell | None:
        return TokenDrawing(vocab_size, AscendCumulativeSum(), AscendLargestValues, num_candidates)

    def prompt_attention(self, shape: AttentionShape) -> nn.Cell | None:
        return cells.AscendPromptAttention(shape.num_heads, shape.scale, cells.prompt_mask(self.activation_dtype))

    def expert_weights(self, array: Array, num_experts: int, name: str) -> Sequence[ms.Parameter]:
        """Return one Parameter [experts, K, N], because GroupedMatmulV4 takes no transposed weights."""
        of_experts = array.reshape(num_experts, -1, array.shape[1])
        return [self._copy(of_experts.transpose(0, 2, 1), name)]

    def quantized_weight(self, weight: QuantizedTensor, name: str) -> tuple[ms.Parameter, ms.Parameter]:
        _check_quantized("QuantBatchMatmul", weight, name)
        return self._quantized_values(weight, f"{name}.codes"), float32_parameter(
            weight.scales.reshape(-1), f"{name}.scales"
        )

    def quantized_expert_weights(
        self, weight: QuantizedTensor, num_experts: int, name: str
    ) -> tuple[ms.Parameter, ms.Parameter]:
        _check_quantized("GroupedMatmulV4", weight, name)
        qvalues = self._expert_qvalues(weight, num_experts, f"{name}.codes")
        return qvalues, float32_parameter(weight.scales.reshape(num_experts, -1), f"{name}.scales")

    def kv_cache(
        self, num_blocks: int, block_size: int, shape: CacheShape, name: str = "cache"
    ) -> tuple[ms.Parameter, ms.Parameter]:
        sizes = num_blocks, block_size, shape.kv_heads
        keys = zeroed_parameter((*sizes, shape.key_width), self.dtype, f"{name}.key")
        return keys, zeroed_parameter((*sizes, shape.value_width), self.dtype, f"{name}.value")

    def copy_blocks(self, source: BlockMemory, target: BlockMemory, pairs: Int32Array) -> None:
        if 0 in source.shape[1:]:  # values that are parts of the keys
            return
        for batch in _independent(pairs, source is target):
            blocks = self._read_blocks(source, batch[:, 0])
            if isinstance(target, ms.Parameter):
                ops.ScatterUpdate()(target, _index(batch[:, 1]), blocks)
            else:
                target[batch[:, 1]] = blocks.asnumpy().view(target.dtype)

    def _read_blocks(self, source: BlockMemory, block_ids: Int32Array) -> ms.Tensor:
        if isinstance(source, ms.Parameter):
            return gen_ops_prim.Gather()(source, _index(block_ids), 0)
        return host_tensor(source[block_ids], self.dtype)

    def _quantized_values(self, weight: QuantizedTensor, name: str) -> ms.Parameter:
        return _copy_qvalues(weight.qvalues, name)

    def _expert_qvalues(self, weight: QuantizedTensor, num_experts: int, name: str) -> ms.Parameter:
        of_experts = weight.qvalues.reshape(num_experts, -1, weight.shape[1])
        return _copy_qvalues(of_experts.transpose(0, 2, 1), name)

    def _copy(self, array: Array, name: str | None) -> ms.Parameter:
        memory = zeroed_array(array.shape, self.dtype)
        memory[...] = to_model_dtype(array, self.dtype)
        return parameter_over(memory, self.dtype, name)


class FastAscendBackend(AscendBackend):
    """The backend of `exactness: fast`: the device chooses the order in which it adds the partial sums of ranks."""

    name = "ascend_fast"
    all_reduce = cells.AscendUnorderedSum


def _check_quantized(primitive: str, weight: QuantizedTensor, name: str) -> None:
    if weight.bits != 8 or weight.num_groups != 1 or weight.g_idx is not None:
        raise ModelError(
            f"{primitive} supports only 8-bit weights with one scale per row. Given: {weight.bits} bits, {name}"
        )


def _copy_qvalues(qvalues: Array, name: str) -> ms.Parameter:
    memory = zeroed_bytes(qvalues.size).view(np.int8).reshape(qvalues.shape)
    memory[...] = qvalues
    return parameter_over(memory, "int8", name)


def _index(block_ids: Int32Array) -> ms.Tensor:
    return ms.Tensor.from_numpy(np.ascontiguousarray(block_ids))


def _independent(pairs: Int32Array, same_memory: bool) -> Iterator[Int32Array]:
    """Split block copies [n, 2] into batches that write no block twice and, if `same_memory`, read none they wrote."""
    start, written = 0, set[int]()
    for index, (source, target) in enumerate(pairs.tolist()):
        if target in written or (same_memory and source in written):
            yield pairs[start:index]
            start = index
            written.clear()
        written.add(target)
    if start < len(pairs):
        yield pairs[start:]
