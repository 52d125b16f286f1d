"""Mixture of experts as Ascend primitives, called as MindFormers calls them.

Rows are sorted by expert, the rows of an expert are multiplied together, and the results are summed with the router
weights. Each product is rounded to the model dtype, and so is the sum.

For 8-bit weights, GroupedMatmulV4 gets no scales and returns int32 sums. With scales, it would return float16 only for
float32 scales, and bfloat16 only for bfloat16 scales. This module multiplies each sum in float32, first by the scale of
the weight and then by the scale of the row, as QuantBatchMatmul does. So all devices compute the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.ops.auto_generate import gen_ops_prim

_ONE_TENSOR, _BY_ROWS, _COUNTS = 3, 0, 1
"""Arguments of GroupedMatmulV4: return one tensor, split the rows among the experts, take numbers of rows."""

_COUNTS_OF_ROWS = 2
"""Argument of MoeInitRoutingV2 that makes it return the number of rows of each expert."""


class AscendRouter(nn.Cell):
    """logits float32 [T, experts] -> topk_weights float32 [T, k] in descending order, and topk_ids int32 [T, k]."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        super().__init__()
        self.choose = gen_ops_prim.MoeGatingTopKSoftmax()
        self.split, self.add, self.div = gen_ops_prim.SplitWithSize(), gen_ops_prim.AddExt(), gen_ops_prim.Div()
        self.top_k = attributes["top_k"]
        self.normalise = attributes["normalise"]
        self.scale = float(np.float32(attributes["scale"]))

    def construct(self, logits: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor]:
        topk_weights, topk_ids, _ = self.choose(logits, None, self.top_k)
        if self.normalise and self.top_k > 1:
            # adds in a fixed order, on every device
            parts = self.split(topk_weights, (1,) * self.top_k, -1)
            total = parts[0]
            for part in parts[1:]:
                total = self.add(total, part, 1)
            topk_weights = self.div(topk_weights, total)
        elif self.normalise:
            topk_weights = self.div(topk_weights, topk_weights)
        topk_weights = topk_weights * self.scale if self.scale != 1 else topk_weights
        return topk_weights, topk_ids


class ExpertDispatch(nn.Cell):
    """Copies each token once for each of its experts, and sorts the copies by expert.

    (x [T, H], topk_ids [T, k]) -> (sorted rows [T*k, H], positions [T*k] of the copies among the sorted rows, in token
    order, number of rows of each expert [experts]).
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.sort = gen_ops_prim.MoeInitRoutingV2()
        self.num_experts = num_experts

    def construct(self, x: ms.Tensor, topk_ids: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor, ms.Tensor]:
        rows, destinations, counts, _ = self.sort(x, topk_ids, 0, 0, self.num_experts, 0, _COUNTS_OF_ROWS, True)
        return rows, destinations, counts


class GroupedMatmul(nn.Cell):
    """Multiplies the rows of each expert by its weight: (x [T*k, K], weight [experts, K, N], number of rows of each
    expert, int64 [experts]) -> [T*k, N], int32 for quantized values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.multiply = gen_ops_prim.GroupedMatmulV4()

    def construct(self, x: ms.Tensor, weight: ms.Tensor, counts: ms.Tensor) -> ms.Tensor:
        absent = None, None, None, None, None, None
        return self.multiply([x], [weight], *absent, counts, None, None, None, _ONE_TENSOR, _BY_ROWS, _COUNTS)[0]


class QuantizedGroupedMatmul(nn.Cell):
    """Does the same as `GroupedMatmul` for int8 weights: (x [T*k, K], qvalues [experts, K, N], scales [experts, N],
    number of rows of each expert [experts], expert of each row [T*k]) -> [T*k, N].
    """

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.quantize, self.product = gen_ops_prim.DynamicQuantExt(), GroupedMatmul()
        self.gather, self.mul = gen_ops_prim.Gather(), ops.Mul()
        self.cast, self.reshape = ops.Cast(), ops.Reshape()
        self.dtype = dtype

    def construct(
        self, x: ms.Tensor, qvalues: ms.Tensor, scales: ms.Tensor, counts: ms.Tensor, numbers: ms.Tensor
    ) -> ms.Tensor:
        rows, row_scales = self.quantize(x, None)
        sums = self.cast(self.product(rows, qvalues, counts), ms.float32)
        scaled = self.mul(sums, self.gather(scales, numbers, 0))
        return self.cast(self.mul(scaled, self.reshape(row_scales, (-1, 1))), self.dtype)


class AscendExperts(nn.Cell):
    """(x [T, H], topk_weights, topk_ids, gate_up [experts, H, 2*I], down [experts, I, H]) -> weighted sums [T, H].

    If `dtype` is given, weights are int8: qvalues [experts, K, N] and float32 scales [experts, N]. The result has
    this dtype.
    """

    def __init__(self, num_experts: int, gate: nn.Cell, dtype: Any = None) -> None:
        super().__init__()
        self.gate, self.is_quantized = gate, dtype is not None
        self.dispatch, self.combine = ExpertDispatch(num_experts), gen_ops_prim.MoeTokenUnpermute()
        self.product = QuantizedGroupedMatmul(dtype) if self.is_quantized else GroupedMatmul()
        self.cast, self.reshape = ops.Cast(), ops.Reshape()

    def numbers_of(self, topk_ids: ms.Tensor) -> ms.Tensor:
        """Return the index of the expert that computes each dispatched row."""
        each = self.reshape(topk_ids, (-1, 1))
        numbers, _, _ = self.dispatch(self.cast(each, ms.float32), each)
        return self.reshape(self.cast(numbers, ms.int32), (-1,))

    def construct(
        self, x: ms.Tensor, topk_weights: ms.Tensor, topk_ids: ms.Tensor, gate_up: Any, down: Any
    ) -> ms.Tensor:
        rows, destinations, counts = self.dispatch(x, topk_ids)
        counts = self.cast(counts, ms.int64)
        if self.is_quantized:
            numbers = self.numbers_of(topk_ids)
            inner = self.gate(self.product(rows, gate_up[0], gate_up[1], counts, numbers))
            rows = self.product(inner, down[0], down[1], counts, numbers)
        else:
            rows = self.product(self.gate(self.product(rows, gate_up[0], counts)), down[0], counts)
        return self.combine(rows, destinations, topk_weights, False, None)
