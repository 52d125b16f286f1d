"""Operations of a description as Cells, each made of the operations of a backend.

Every Cell takes a tuple of the values it reads and the arguments of the step, and returns a tuple of the values it
writes. Arguments are those of `lowering.step.STEP_INPUTS`, then both lengths as attention reads them, and what says
which keys rows see (`Backend.lengths`, `Backend.seen`). What no device has an operator for is made of MindSpore's own
operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from llm_serving.backends.base import Backend

Tensors = Any
"""A tuple of tensors; MindSpore reads these functions, not Python."""


class Tables(nn.Cell):
    """() -> cosines and sines [T, head_dim] of the rows' positions."""

    def __init__(self, backend: Backend, cos: ms.Parameter, sin: ms.Parameter) -> None:
        super().__init__()
        self.look_up = backend.embedding()
        self.cos, self.sin = cos, sin

    def construct(self, _: Tensors, step: Tensors) -> Tensors:
        return self.look_up(step[1], self.cos), self.look_up(step[1], self.sin)


class Split(nn.Cell):
    """x -> its columns, one range after another."""

    def __init__(self, backend: Backend, widths: Sequence[int]) -> None:
        super().__init__()
        self.split = backend.split(widths)

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        return self.split(read[0])


class Scaled(nn.Cell):
    """x * scale, rounded once."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = float(np.float32(scale))

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return (x.astype(ms.float32) * self.scale).astype(x.dtype)


class Gather(nn.Cell):
    """() -> rows of a table, by token, scaled."""

    def __init__(self, backend: Backend, table: ms.Parameter, scale: float, rounded: bool) -> None:
        super().__init__()
        self.look_up = backend.embedding()
        self.table = table
        self.is_scaled = scale != 1
        self.scaled = Scaled(backend.rounded(scale) if rounded else scale)

    def construct(self, _: Tensors, step: Tensors) -> Tensors:
        rows = self.look_up(step[0], self.table)
        return (self.scaled(rows) if self.is_scaled else rows,)


class Linear(nn.Cell):
    """x [T, K] -> x * weight^T + bias, rounded after each."""

    def __init__(self, backend: Backend, weight: ms.Parameter, bias: ms.Parameter | None) -> None:
        super().__init__()
        self.product = backend.linear()
        self.weight = weight
        self.has_bias = bias is not None
        if bias is not None:
            # Sums of backends take two tensors of one shape: the bias is looked up once for each row.
            self.bias = bias
            self.repeat = backend.embedding()
            self.add = backend.add()

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        x = self.product(read[0], self.weight)
        if self.has_bias:
            first_row = ops.zeros((x.shape[0],), ms.int32)
            x = self.add(x, self.repeat(first_row, self.bias))
        return (x,)


class Norm(nn.Cell):
    """x -> its root mean square norm, over rows or over each `group` columns."""

    def __init__(self, backend: Backend, gain: ms.Parameter, eps: float, group: int) -> None:
        super().__init__()
        self.norm = backend.rms_norm(eps)
        self.gain = gain
        self.group = group
        # A gain of more digits than the rows have, and heads, which not every device cuts in every type: in float32,
        # rounded once, as a norm of rows is too.
        self.is_wide = gain.dtype != backend.activation_dtype or group > 0

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        x = read[0]
        rows = x.astype(ms.float32) if self.is_wide else x
        rows = rows.reshape(-1, self.group) if self.group > 0 else rows
        gain = self.gain.astype(ms.float32) if self.is_wide else self.gain
        y = self.norm(rows, gain)
        y = y.reshape(-1, x.shape[1]) if self.group > 0 else y
        return (y.astype(x.dtype) if self.is_wide else y,)


class AddNorm(nn.Cell):
    """x, added -> the norm of their sum, and the sum."""

    def __init__(self, backend: Backend, gain: ms.Parameter, eps: float) -> None:
        super().__init__()
        self.is_wide = gain.dtype != backend.activation_dtype
        self.add = backend.add()
        self.norm = Norm(backend, gain, eps, 0)
        self.add_norm = backend.add_rms_norm(eps)
        self.gain = gain

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        if self.is_wide:
            total = self.add(read[0], read[1])
            return self.norm((total,), step)[0], total
        return self.add_norm(read[0], read[1], self.gain)


class Rotate(nn.Cell):
    """x, perhaps another, cosines and sines -> both turned."""

    def __init__(self, backend: Backend, widths: Sequence[int], head_dim: int) -> None:
        super().__init__()
        self.is_pair = len(widths) == 2
        self.rotate = backend.rotary(head_dim)

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        if self.is_pair:
            return self.rotate(read[0], read[1], read[2], read[3], step[5])
        return (self.rotate(read[0], read[0], read[1], read[2], step[5])[0],)


class Store(nn.Cell):
    """k, v -> what attention depends on."""

    def __init__(self, backend: Backend, kv_cache: tuple[ms.Parameter, ms.Parameter]) -> None:
        super().__init__()
        self.store = backend.store_kv()
        self.key_cache, self.value_cache = kv_cache

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        return (self.store(read[0], read[1], self.key_cache, self.value_cache, step[2]),)


class Attend(nn.Cell):
    """q, what was stored -> [T, num_heads * head_dim]"""

    def __init__(self, attention: nn.Cell, kv_cache: tuple[ms.Parameter, ms.Parameter]) -> None:
        super().__init__()
        self.attention = attention
        self.key_cache, self.value_cache = kv_cache

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        q = ops.depend(read[0], read[1])
        return (self.attention(q, self.key_cache, self.value_cache, step[3], step[7], step[8], step[9]),)


class AttendPrompts(nn.Cell):
    """q, what was stored, k, v -> [T, num_heads * head_dim]"""

    def __init__(self, attention: nn.Cell) -> None:
        super().__init__()
        self.attention = attention

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        q = ops.depend(read[0], read[1])
        return (self.attention(q, read[2], read[3], step[7], step[8]),)


class Activate(nn.Cell):
    """x [T, 2 I] -> function(first half) * second half"""

    def __init__(self, backend: Backend, function: str) -> None:
        super().__init__()
        self.gate = backend.swiglu() if function == "silu" else GeluTanhGate()

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        return (self.gate(read[0]),)


class GeluTanhGate(nn.Cell):
    """gelu of the first half, by its approximation with tanh (Hendrycks and Gimpel 2016), times the second."""

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        half = x.shape[-1] // 2
        gate, up = x[:, :half].astype(ms.float32), x[:, half:].astype(ms.float32)
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return (0.5 * gate * (1 + ops.tanh(inner)) * up).astype(x.dtype)


class Add(nn.Cell):
    """a, b -> a + scale * b, rounded once."""

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


class Weigh(nn.Cell):
    """x, gate [T, 1] -> x * sigmoid(gate)"""

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        x, gate = read[0], read[1]
        return ((x.astype(ms.float32) * ops.sigmoid(gate.astype(ms.float32))).astype(x.dtype),)


class Route(nn.Cell):
    """x -> shares of all experts, float32 [T, experts], zero where a row does not go; and the same again.

    The lower number comes first among equals: what is sorted is made unequal by position.
    """

    def __init__(
        self,
        backend: Backend,
        weight: ms.Parameter,
        correction: ms.Parameter | None,
        attributes: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.product = backend.logits()
        self.weight = weight
        self.num_experts = weight.shape[0]
        self.correction = ms.Tensor(np.zeros(1, np.float32)) if correction is None else correction
        self.has_correction = correction is not None
        self.top_k = attributes["top_k"]
        self.groups, self.top_groups = attributes["groups"], attributes["top_groups"]
        self.is_softmax = attributes["score"] == "softmax"
        self.normalise = attributes["normalise"]
        self.scale = float(np.float32(attributes["scale"]))
        self.numbers = ms.Tensor(np.arange(self.num_experts, dtype=np.int32))
        self.group_numbers = ms.Tensor(np.arange(self.groups, dtype=np.int32))

    def rank(self, wanted: ms.Tensor, numbers: ms.Tensor) -> ms.Tensor:
        """How many of a row come before each element: larger ones, and equal ones of a lower number."""
        larger = wanted.expand_dims(1) > wanted.expand_dims(2)
        equal = ops.logical_and(
            wanted.expand_dims(1) == wanted.expand_dims(2),
            (numbers.reshape(1, -1) < numbers.reshape(-1, 1)).expand_dims(0),
        )
        return ops.logical_or(larger, equal).astype(ms.int32).sum(-1)

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        logits = self.product(read[0], self.weight)
        scores = ops.softmax(logits, -1) if self.is_softmax else ops.sigmoid(logits)
        wanted = scores + self.correction if self.has_correction else scores
        if self.groups > 1:
            of_groups = wanted.reshape(wanted.shape[0], self.groups, -1)
            best = ops.topk(of_groups, 2)[0].sum(-1) if self.has_correction else of_groups.max(-1)
            kept = self.rank(best, self.group_numbers) < self.top_groups
            lowest = ops.full_like(of_groups, -1e30)
            kept = ops.logical_and(kept.expand_dims(-1), ops.ones_like(of_groups).astype(ms.bool_))
            wanted = ops.select(kept, of_groups, lowest).reshape(wanted.shape[0], -1)
        chosen = self.rank(wanted, self.numbers) < self.top_k
        shares = ops.select(chosen, scores, ops.zeros_like(scores))
        shares = shares / shares.sum(-1, keepdims=True) if self.normalise else shares
        shares = shares * self.scale
        return shares, shares


class Experts(nn.Cell):
    """x, shares of all experts -> their sum in float32, in the order of their numbers, rounded once.

    Every expert computes every row: the graph has one shape whatever the rows choose.
    """

    def __init__(self, backend: Backend, gate_up: Sequence[ms.Parameter], down: Sequence[ms.Parameter]) -> None:
        super().__init__()
        self.gate_up = ms.ParameterTuple(gate_up)
        self.down = ms.ParameterTuple(down)
        self.product = backend.linear()
        self.gate = backend.swiglu()
        self.out = backend.logits()

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        x, shares = read[0], read[1]
        total = ops.zeros_like(x).astype(ms.float32)
        for number in range(len(self.gate_up)):
            inner = self.gate(self.product(x, self.gate_up[number]))
            total = total + shares[:, number : number + 1] * self.out(inner, self.down[number])
        return (total.astype(x.dtype),)


class Select(nn.Cell):
    """x -> the rows that give a result"""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.look_up = backend.embedding()

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        return (self.look_up(step[6], read[0]),)


class Output(nn.Cell):
    """x -> logits, float32, scaled and capped"""

    def __init__(self, backend: Backend, weight: ms.Parameter, scale: float, cap: float) -> None:
        super().__init__()
        self.product = backend.logits()
        self.weight = weight
        self.scale, self.cap = float(np.float32(scale)), float(np.float32(cap))

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        logits = self.product(read[0], self.weight)
        logits = logits * self.scale if self.scale != 1 else logits
        return (ops.tanh(logits / self.cap) * self.cap if self.cap > 0 else logits,)


class States(nn.Cell):
    """x -> x in float32"""

    def construct(self, read: Tensors, step: Tensors) -> Tensors:
        return (read[0].astype(ms.float32),)
