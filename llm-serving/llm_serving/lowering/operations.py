"""The operations of a network as Cells, each composed of operations of a backend or of MindSpore.

Every Cell takes a tuple of the values that it reads and a tuple of the step inputs, and returns a tuple of the values
that it writes. Some docstrings give both as "values read -> values written". The step inputs are
`lowering.step_inputs.STEP_INPUTS`, then the attention mask (`Backend.attention_mask`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from llm_serving.backends.base import Backend

Tensors = Any
"""A tuple of tensors. It has no type, because MindSpore compiles the functions that take it."""


def is_quantized(weight: Sequence[ms.Parameter]) -> bool:
    return bool(weight[0].dtype == ms.int8)


class CosSinCell(nn.Cell):
    """Looks up the cosines and sines of the rows' positions, [T, head_dim] each."""

    def __init__(self, backend: Backend, cos: ms.Parameter, sin: ms.Parameter) -> None:
        super().__init__()
        self.embedding = backend.embedding()
        self.cos, self.sin = cos, sin

    def construct(self, _: Tensors, step: Tensors) -> Tensors:
        return self.embedding(step[1], self.cos), self.embedding(step[1], self.sin)


class SplitCell(nn.Cell):
    def __init__(self, backend: Backend, widths: Sequence[int]) -> None:
        super().__init__()
        self.split = backend.split(widths)

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        return self.split(read[0])


class Scale(nn.Cell):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = float(np.float32(scale))

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return (x.astype(ms.float32) * self.scale).astype(x.dtype)


class EmbeddingCell(nn.Cell):
    """Looks up scaled rows of a table by token id. A token whose row another rank holds gets zeros."""

    def __init__(
        self, backend: Backend, table: Sequence[ms.Parameter], scale: float, rounded: bool, first: int, rows: int
    ) -> None:
        super().__init__()
        self.first, self.num_rows = first, table[0].shape[0]
        self.is_part = rows > 0
        self.embedding = backend.quantized_embedding() if is_quantized(table) else backend.embedding()
        self.table = ms.ParameterTuple(table)
        self.is_scaled = scale != 1
        self.scaled = Scale(backend.rounded(scale) if rounded else scale)

    def construct(self, _: Tensors, step: Tensors) -> Tensors:
        tokens = step[0]
        if self.is_part:
            at = tokens - self.first
            is_here = ops.logical_and(at >= 0, at < self.num_rows)
            rows = self.embedding(at * is_here.astype(ms.int32), *self.table)
            rows = rows * is_here.astype(rows.dtype).reshape(-1, 1)
        else:
            rows = self.embedding(tokens, *self.table)
        return (self.scaled(rows) if self.is_scaled else rows,)


class LowRankCell(nn.Cell):
    """Adds the change of each row's LoRA adapter: base, x -> base + B (A x). A and B stack the matrices of all adapter
    slots. A row keeps only the columns of A x that belong to its own slot, so other adapters do not change it.
    `selected`: whether x has only sampled rows.
    """

    def __init__(self, backend: Backend, a: ms.Parameter, b: ms.Parameter, slots: int, selected: bool) -> None:
        super().__init__()
        self.product = backend.linear()
        self.a, self.b, self.selected = a, b, selected
        self.slot_of_column = ms.Tensor(np.repeat(np.arange(slots, dtype=np.int32), a.shape[0] // slots).reshape(1, -1))

    def construct(self, base: ms.Tensor, x: ms.Tensor, step: Tensors) -> ms.Tensor:
        slots = ops.gather(step[8], step[6], 0) if self.selected else step[8]
        slots = slots.reshape(-1, 1)
        own = ops.equal(slots, self.slot_of_column).astype(x.dtype)
        change = self.product(self.product(x, self.a) * own, self.b)
        wide = base.astype(ms.float32)
        return ops.where(slots >= 0, wide + change.astype(ms.float32), wide).astype(base.dtype)


class LinearCell(nn.Cell):
    """x [T, K] -> x * weight^T + change of adapters + bias, rounded after each operation."""

    def __init__(
        self,
        backend: Backend,
        weight: Sequence[ms.Parameter],
        bias: ms.Parameter | None,
        change: LowRankCell | None = None,
    ) -> None:
        super().__init__()
        self.product = backend.quantized_linear() if is_quantized(weight) else backend.linear()
        self.weight = ms.ParameterTuple(weight)
        self.has_adapters = change is not None
        if change is not None:
            self.change = change
        self.has_bias = bias is not None
        if bias is not None:
            self.bias = bias
            self.add = backend.add()

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        y = self.product(read[0], *self.weight)
        if self.has_adapters:
            y = self.change(y, read[0], step)
        return (self.add(y, self.bias) if self.has_bias else y,)


class RmsNormCell(nn.Cell):
    def __init__(self, backend: Backend, gain: ms.Parameter, eps: float, group: int) -> None:
        super().__init__()
        self.norm = backend.rms_norm(eps)
        self.gain = gain
        self.group = group
        # Norms with float32 weights and norms of heads are computed in float32 and rounded once. Devices lack norms of
        # heads in some dtypes.
        self.is_wide = gain.dtype != backend.activation_dtype or group > 0

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        x = read[0]
        rows = x.astype(ms.float32) if self.is_wide else x
        rows = rows.reshape(-1, self.group) if self.group > 0 else rows
        gain = self.gain.astype(ms.float32) if self.is_wide else self.gain
        y = self.norm(rows, gain)
        y = y.reshape(-1, x.shape[1]) if self.group > 0 else y
        return (y.astype(x.dtype) if self.is_wide else y,)


class AddRmsNormCell(nn.Cell):
    def __init__(self, backend: Backend, gain: ms.Parameter, eps: float) -> None:
        super().__init__()
        self.is_wide = gain.dtype != backend.activation_dtype
        self.add = backend.add()
        self.norm = RmsNormCell(backend, gain, eps, 0)
        self.add_norm = backend.add_rms_norm(eps)
        self.gain = gain

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        if self.is_wide:
            total = self.add(read[0], read[1])
            return self.norm((total,), step)[0], total
        return self.add_norm(read[0], read[1], self.gain)


class RopeCell(nn.Cell):
    """Applies the rotary embedding to x and, if given, a second x. Cosines and sines are its last inputs."""

    def __init__(self, backend: Backend, widths: Sequence[int], head_dim: int) -> None:
        super().__init__()
        self.is_pair = len(widths) == 2
        self.rotate = backend.rotary(head_dim)

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        if self.is_pair:
            return self.rotate(read[0], read[1], read[2], read[3], step[5])
        return (self.rotate(read[0], read[0], read[1], read[2], step[5])[0],)


class StoreKVCell(nn.Cell):
    """Writes k and v to the cache. Returns a tensor that attention reads, so that attention runs later."""

    def __init__(self, backend: Backend, kv_cache: tuple[ms.Parameter, ms.Parameter]) -> None:
        super().__init__()
        self.store = backend.store_kv()
        self.key_cache, self.value_cache = kv_cache

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        return (self.store(read[0], read[1], self.key_cache, self.value_cache, step[2]),)


class AttentionCell(nn.Cell):
    """Computes attention over the cache: (q, output of `StoreKVCell`) -> [T, num_heads * head_dim]."""

    def __init__(self, attention: nn.Cell, kv_cache: tuple[ms.Parameter, ms.Parameter]) -> None:
        super().__init__()
        self.attention = attention
        self.key_cache, self.value_cache = kv_cache

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        q = ops.depend(read[0], read[1])
        return (self.attention(q, self.key_cache, self.value_cache, step[3], step[4], step[5], step[7]),)


class PromptAttentionCell(nn.Cell):
    """Computes attention of whole prompts: (q, output of `StoreKVCell`, k, v) -> [T, num_heads * head_dim]."""

    def __init__(self, attention: nn.Cell) -> None:
        super().__init__()
        self.attention = attention

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        q = ops.depend(read[0], read[1])
        return (self.attention(q, read[2], read[3], step[4], step[5]),)


class OneTensorCell(nn.Cell):
    """Applies a Cell that takes and returns one tensor."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell = cell

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        return (self.cell(read[0]),)


class GeluTanhGate(nn.Cell):
    """Computes gelu(first half) * second half, with the tanh approximation of gelu (Hendrycks and Gimpel 2016)."""

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        half = x.shape[-1] // 2
        gate, up = x[:, :half].astype(ms.float32), x[:, half:].astype(ms.float32)
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return (0.5 * gate * (1 + ops.tanh(inner)) * up).astype(x.dtype)


class AddCell(nn.Cell):
    def __init__(self, backend: Backend, scale: float) -> None:
        super().__init__()
        self.add = backend.add()
        self.is_scaled = scale != 1
        self.scale = float(np.float32(scale))

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        a, b = read[0], read[1]
        if self.is_scaled:
            return ((a.astype(ms.float32) + b.astype(ms.float32) * self.scale).astype(a.dtype),)
        return (self.add(a, b),)


class SigmoidGateCell(nn.Cell):
    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        x, gate = read[0], read[1]
        return ((x.astype(ms.float32) * ops.sigmoid(gate.astype(ms.float32))).astype(x.dtype),)


class RouteCell(nn.Cell):
    """Chooses the experts of each row of x. Returns two tensors for `ExpertsCell`: experts and their weights."""

    def __init__(
        self, backend: Backend, weight: ms.Parameter, correction: ms.Parameter | None, attributes: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.product = backend.logits()
        self.weight = weight
        self.route = backend.route(attributes, weight.shape[0], correction)

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        return self.route(self.product(read[0], self.weight))


class ExpertsCell(nn.Cell):
    """Computes the weighted sum of each row's experts, rounded once, from x and the tensors of `RouteCell`."""

    def __init__(
        self, backend: Backend, gate_up: Sequence[ms.Parameter], down: Sequence[ms.Parameter], num_experts: int
    ) -> None:
        super().__init__()
        self.gate_up = ms.ParameterTuple(gate_up)
        self.down = ms.ParameterTuple(down)
        self.experts = (backend.quantized_experts if is_quantized(gate_up) else backend.experts)(num_experts)

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        return (self.experts(read[0], read[1], read[2], self.gate_up, self.down),)


class SelectRowsCell(nn.Cell):
    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.embedding = backend.embedding()

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        return (self.embedding(step[6], read[0]),)


class LmHeadCell(nn.Cell):
    """Computes float32 logits from x, scaled and capped. With a sharded head, the logits of other ranks are zeros."""

    def __init__(
        self, backend: Backend, weight: Sequence[ms.Parameter], scale: float, cap: float, first: int, rows: int
    ) -> None:
        super().__init__()
        self.is_part = rows > 0
        self.zeros = first, rows - first - weight[0].shape[0]
        self.reduce = ops.AllReduce(ops.ReduceOp.SUM)
        self.product = backend.quantized_logits() if is_quantized(weight) else backend.logits()
        self.weight = ms.ParameterTuple(weight)
        self.scale, self.cap = float(np.float32(scale)), float(np.float32(cap))

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        logits = self.product(read[0], *self.weight)
        if self.is_part:
            logits = self.reduce(ops.pad(logits, self.zeros))
        logits = logits * self.scale if self.scale != 1 else logits
        return (ops.tanh(logits / self.cap) * self.cap if self.cap > 0 else logits,)


class HiddenStatesCell(nn.Cell):
    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        return (read[0].astype(ms.float32),)
