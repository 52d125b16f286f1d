"""The operations of a decoder as MindSpore's own operations. They need no compiler and run on any device, but slowly.

Weights are rounded to the model dtype; everything else is float32. The order of the sums in MindSpore's products may
depend on the shape of the batch, so an answer may differ in its last bits from the answer at batch size 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from llm_serving.backends.ascend_cells import AscendSplit
from llm_serving.backends.base import Array, AttentionShape, Backend, model_dtype
from llm_serving.backends.parameters import (
    copy_blocks_in_memory,
    parameter_over,
    to_model_dtype,
    zeroed_array,
    zeroed_parameter,
)
from llm_serving.core.dtypes import from_bfloat16
from llm_serving.network.builder import Network
from llm_serving.network.caches import CacheShape
from llm_serving.network.quantization import unsupported_by_cells


class PlainEmbedding(nn.Cell):
    def construct(self, token_ids: ms.Tensor, table: ms.Tensor) -> ms.Tensor:
        return ops.gather(table, token_ids, 0)


class PlainRmsNorm(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def construct(self, x: ms.Tensor, gamma: ms.Tensor) -> ms.Tensor:
        return x * ops.rsqrt(ops.mean(ops.square(x), -1, True) + self.eps) * gamma


class PlainAddRmsNorm(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.norm = PlainRmsNorm(eps)

    def construct(self, x: ms.Tensor, y: ms.Tensor, gamma: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor]:
        total = x + y
        return self.norm(total, gamma), total


class PlainRotary(nn.Cell):
    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.halves = ops.Split(-1, 2)
        self.concat = ops.Concat(-1)

    def rotate(self, x: ms.Tensor, cos: ms.Tensor, sin: ms.Tensor) -> ms.Tensor:
        width = x.shape[1]
        heads = x.reshape(-1, width // self.head_dim, self.head_dim)
        first, second = self.halves(heads)
        rotated = self.concat((-second, first))
        return (heads * cos + rotated * sin).reshape(-1, width)

    def construct(
        self, q: ms.Tensor, k: ms.Tensor, cos: ms.Tensor, sin: ms.Tensor, context_lens: ms.Tensor
    ) -> tuple[ms.Tensor, ms.Tensor]:
        cos = ops.expand_dims(cos, 1)
        sin = ops.expand_dims(sin, 1)
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin)


class PlainStoreKV(nn.Cell):
    """Writes keys and values. Skipped rows go to an extra block after the last one, which no block table contains."""

    def __init__(self) -> None:
        super().__init__()
        self.update = ops.ScatterNdUpdate()

    def construct(
        self, k: ms.Tensor, v: ms.Tensor, key_cache: ms.Tensor, value_cache: ms.Tensor, slot_mapping: ms.Tensor
    ) -> ms.Tensor:
        num_blocks, block_size, num_kv_heads, _ = key_cache.shape
        spare = ops.full_like(slot_mapping, (num_blocks - 1) * block_size)
        slots = ops.select(slot_mapping >= 0, slot_mapping, spare)
        index = ops.stack((slots // block_size, slots % block_size), -1)
        keys = self.update(key_cache, index, k.reshape(-1, num_kv_heads, key_cache.shape[3]))
        values = self.update(value_cache, index, v.reshape(-1, num_kv_heads, value_cache.shape[3]))
        return ops.depend(values, keys)


class PlainVisiblePositions(nn.Cell):
    """Returns the positions of rows unchanged. `PlainPagedAttention` uses them instead of a mask."""

    def construct(self, positions: ms.Tensor, block_tables: ms.Tensor) -> ms.Tensor:
        return positions


class PlainPagedAttention(nn.Cell):
    """Paged attention that gathers the keys and values of each row's request, and computes each row separately."""

    def __init__(self, shape: AttentionShape, slopes: ms.Parameter | None = None) -> None:
        super().__init__()
        self.num_kv_heads = shape.num_kv_heads
        self.group = shape.num_heads // shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.scale, self.window, self.cap = shape.scale, shape.window, shape.cap
        self.has_slopes = slopes is not None
        self.slopes = ms.Tensor(np.zeros(1, np.float32)) if slopes is None else slopes
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.weighted_sum = ops.BatchMatMul()
        self.minus_infinity = ms.Tensor(np.float32(np.finfo(np.float32).min))

    def keys_of(self, cache: ms.Tensor, tables: ms.Tensor) -> ms.Tensor:
        """Gather keys or values from the blocks of each row: [T, W] -> [T, num_kv_heads, W*block_size, D]."""
        rows = ops.gather(cache, tables, 0).reshape(tables.shape[0], -1, self.num_kv_heads, self.head_dim)
        return rows.transpose(0, 2, 1, 3)

    def construct(
        self,
        q: ms.Tensor,
        key_cache: ms.Tensor,
        value_cache: ms.Tensor,
        block_tables: ms.Tensor,
        query_lens: ms.Tensor,
        context_lens: ms.Tensor,
        positions: ms.Tensor,
    ) -> ms.Tensor:
        num_tokens = q.shape[0]
        ends = ops.cumsum(query_lens, 0)
        row = ops.arange(num_tokens).astype(ms.int32)
        request = (row.reshape(-1, 1) >= ends.reshape(1, -1)).astype(ms.int32).sum(-1)
        tables = ops.gather(block_tables, request, 0)
        keys = self.keys_of(key_cache, tables)
        values = self.keys_of(value_cache, tables)
        heads = q.reshape(-1, self.num_kv_heads, self.group, self.head_dim)
        scores = self.scores(heads, keys) * self.scale
        scores = ops.tanh(scores / self.cap) * self.cap if self.cap > 0 else scores
        position = ops.arange(keys.shape[2]).astype(ms.int32)
        distance = positions.reshape(-1, 1) - position.reshape(1, -1)
        if self.has_slopes:
            slopes = self.slopes.reshape(1, self.num_kv_heads, self.group, 1)
            scores = scores - slopes * distance.astype(ms.float32).reshape(num_tokens, 1, 1, -1)
        visible = distance >= 0
        visible = ops.logical_and(visible, distance < self.window) if self.window > 0 else visible
        # Zero times NaN is NaN, and hidden KV slots may contain NaN of other requests.
        values = ops.where(visible.reshape(num_tokens, 1, -1, 1), values, ops.zeros_like(values))
        visible = visible.reshape(num_tokens, 1, 1, -1)
        weights = ops.softmax(ops.where(visible, scores, self.minus_infinity), -1)
        return self.weighted_sum(weights, values).reshape(num_tokens, -1)


class PlainSwiglu(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.halves = ops.Split(-1, 2)

    def construct(self, gate_up: ms.Tensor) -> ms.Tensor:
        gate, up = self.halves(gate_up)
        return gate * ops.sigmoid(gate) * up


class PlainAdd(nn.Cell):
    def construct(self, a: ms.Tensor, b: ms.Tensor) -> ms.Tensor:
        return a + b


class PlainRouter(nn.Cell):
    """Returns the weight of each expert [T, experts] (0: not chosen) twice: `Backend.route` has two results."""

    def __init__(self, attributes: Mapping[str, Any], num_experts: int, correction: ms.Parameter | None = None) -> None:
        super().__init__()
        self.correction = ms.Tensor(np.zeros(1, np.float32)) if correction is None else correction
        self.has_correction = correction is not None
        self.top_k = attributes["top_k"]
        self.groups, self.top_groups = attributes["groups"], attributes["top_groups"]
        self.is_softmax = attributes["score"] == "softmax"
        self.normalise = attributes["normalise"]
        self.scale = float(np.float32(attributes["scale"]))
        self.numbers = ms.Tensor(np.arange(num_experts, dtype=np.int32))
        self.group_numbers = ms.Tensor(np.arange(self.groups, dtype=np.int32))

    def rank(self, choice_scores: ms.Tensor, numbers: ms.Tensor) -> ms.Tensor:
        """Return the rank of each score in its row; 0 is the largest. Of equal scores, the lowest index ranks first."""
        larger = choice_scores.expand_dims(1) > choice_scores.expand_dims(2)
        equal = ops.logical_and(
            choice_scores.expand_dims(1) == choice_scores.expand_dims(2),
            (numbers.reshape(1, -1) < numbers.reshape(-1, 1)).expand_dims(0),
        )
        return ops.logical_or(larger, equal).astype(ms.int32).sum(-1)

    def construct(self, logits: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor]:
        scores = ops.softmax(logits, -1) if self.is_softmax else ops.sigmoid(logits)
        choice_scores = scores + self.correction if self.has_correction else scores
        if self.groups > 1:
            of_groups = choice_scores.reshape(choice_scores.shape[0], self.groups, -1)
            best = ops.topk(of_groups, 2)[0].sum(-1) if self.has_correction else of_groups.max(-1)
            selected = self.rank(best, self.group_numbers) < self.top_groups
            lowest = ops.full_like(of_groups, -1e30)
            selected = ops.logical_and(selected.expand_dims(-1), ops.ones_like(of_groups).astype(ms.bool_))
            choice_scores = ops.select(selected, of_groups, lowest).reshape(choice_scores.shape[0], -1)
        topk_ids = self.rank(choice_scores, self.numbers) < self.top_k
        topk_weights = ops.select(topk_ids, scores, ops.zeros_like(scores))
        topk_weights = topk_weights / topk_weights.sum(-1, keepdims=True) if self.normalise else topk_weights
        topk_weights = topk_weights * self.scale
        return topk_weights, topk_weights


class PlainExperts(nn.Cell):
    """Adds the weighted results in the order of expert numbers."""

    def __init__(self, product: nn.Cell, gate: nn.Cell) -> None:
        super().__init__()
        self.product, self.gate = product, gate

    def construct(self, x: ms.Tensor, topk_weights: ms.Tensor, _: ms.Tensor, gate_up: Any, down: Any) -> ms.Tensor:
        total = ops.zeros_like(x)
        for number in range(len(gate_up)):
            inner = self.gate(self.product(x, gate_up[number]))
            total = total + topk_weights[:, number : number + 1] * self.product(inner, down[number])
        return total


class PlainBackend(Backend):
    """A backend of MindSpore's own operators on a CPU. Tests compare the graphs of other backends with it."""

    name = "plain"
    embedding = PlainEmbedding
    rms_norm = PlainRmsNorm
    add_rms_norm = PlainAddRmsNorm
    route = PlainRouter
    split = AscendSplit
    rotary = PlainRotary
    store_kv = PlainStoreKV
    paged_attention = PlainPagedAttention
    swiglu = PlainSwiglu
    add = PlainAdd
    copy_blocks = staticmethod(copy_blocks_in_memory)

    def __init__(self, dtype: str) -> None:
        model_dtype(dtype)
        self.dtype = dtype
        self.activation_dtype = ms.float32

    def unsupported(self, network: Network, num_positions: int) -> str | None:
        return unsupported_by_cells(network)

    def linear(self) -> nn.Cell:
        return ops.MatMul(transpose_b=True)

    def logits(self) -> nn.Cell:
        return self.linear()

    def experts(self, num_experts: int) -> nn.Cell:
        return PlainExperts(self.linear(), self.swiglu())

    def attention_mask(self, max_positions: int, block_size: int) -> nn.Cell:
        return PlainVisiblePositions()

    def expert_weights(self, array: Array, num_experts: int, name: str) -> Sequence[ms.Parameter]:
        return [self._copy(part, f"{name}.{at}") for at, part in enumerate(np.split(array, num_experts))]

    def kv_cache(
        self, num_blocks: int, block_size: int, shape: CacheShape, name: str = "cache"
    ) -> tuple[ms.Parameter, ms.Parameter]:
        sizes = num_blocks + 1, block_size, shape.kv_heads
        keys = zeroed_parameter((*sizes, shape.key_width), "float32", f"{name}.key")
        return keys, zeroed_parameter((*sizes, shape.value_width), "float32", f"{name}.value")

    def _copy(self, array: Array, name: str | None) -> ms.Parameter:
        rounded = to_model_dtype(array, self.dtype)
        memory = zeroed_array(array.shape, "float32")
        memory[...] = from_bfloat16(rounded) if self.dtype == "bfloat16" else rounded
        return parameter_over(memory, "float32", name)
