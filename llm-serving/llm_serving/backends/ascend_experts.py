"""Experts as the primitives an Ascend device has, called as MindFormers and others call them.

Rows are sorted by expert, those of an expert are multiplied together, and come back with their shares. A product is
rounded to the model dtype, a sum once more.

Of weights of 8 bits GroupedMatmulV4 gives the sums alone, in int32: with scales it would give float16 of float32 ones,
and bfloat16 only of those that are rounded to bfloat16. Scaled here, in float32 and in the order of QuantBatchMatmul,
they are the same bits on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.ops.auto_generate import gen_ops_prim

_ONE_TENSOR, _BY_ROWS, _COUNTS = 3, 0, 1
"""GroupedMatmulV4: one result, of which each expert has some rows, so many as a list of counts says."""

_COUNTS_OF_ROWS = 2
"""MoeInitRoutingV2: tells how many rows each expert has."""


class Route(nn.Cell):
    """logits float32 [T, experts] -> shares float32 [T, k] by falling score, and their experts int32 [T, k]"""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        super().__init__()
        self.choose = gen_ops_prim.MoeGatingTopKSoftmax()
        self.split, self.sum, self.div = gen_ops_prim.SplitWithSize(), ops.AddN(), ops.RealDiv()
        self.top_k = attributes["top_k"]
        self.normalise = attributes["normalise"]
        self.scale = float(np.float32(attributes["scale"]))

    def construct(self, logits: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor]:
        shares, chosen, _ = self.choose(logits, None, self.top_k)
        if self.normalise and self.top_k > 1:
            # In this order on every device.
            shares = self.div(shares, self.sum(self.split(shares, (1,) * self.top_k, -1)))
        elif self.normalise:
            shares = self.div(shares, shares)
        shares = shares * self.scale if self.scale != 1 else shares
        return shares, chosen


class Dispatch(nn.Cell):
    """(x [T, H], chosen [T, k]) -> rows [T*k, H] by expert, where each went [T*k], rows of each expert [experts]

    Args:
        num_experts: Of the layer.
    """

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.sort = gen_ops_prim.MoeInitRoutingV2()
        self.num_experts = num_experts

    def construct(self, x: ms.Tensor, chosen: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor, ms.Tensor]:
        rows, places, counts, _ = self.sort(x, chosen, 0, 0, self.num_experts, 0, _COUNTS_OF_ROWS, True)
        return rows, places, counts


class GroupedProduct(nn.Cell):
    """(x [T*k, K], weight [experts, K, N], int64 [experts]) -> [T*k, N], int32 of codes"""

    def __init__(self) -> None:
        super().__init__()
        self.multiply = gen_ops_prim.GroupedMatmulV4()

    def construct(self, x: ms.Tensor, weight: ms.Tensor, counts: ms.Tensor) -> ms.Tensor:
        absent = None, None, None, None, None, None
        return self.multiply([x], [weight], *absent, counts, None, None, None, _ONE_TENSOR, _BY_ROWS, _COUNTS)[0]


class Experts(nn.Cell):
    """(x [T, H], shares, chosen, gate_up [experts, H, 2*I], down [experts, I, H]) -> [T, H]

    Args:
        num_experts: Of the layer.
        gate: (x [T, 2*I]) -> [T, I]
    """

    def __init__(self, num_experts: int, gate: nn.Cell) -> None:
        super().__init__()
        self.gate = gate
        self.dispatch, self.combine = Dispatch(num_experts), gen_ops_prim.MoeTokenUnpermute()
        self.product = GroupedProduct()
        self.cast = ops.Cast()

    def construct(self, x: ms.Tensor, shares: ms.Tensor, chosen: ms.Tensor, gate_up: Any, down: Any) -> ms.Tensor:
        rows, places, counts = self.dispatch(x, chosen)
        counts = self.cast(counts, ms.int64)
        rows = self.product(self.gate(self.product(rows, gate_up[0], counts)), down[0], counts)
        return self.combine(rows, places, shares, False, None)


class QuantizedProduct(nn.Cell):
    """(x [T*k, K], codes [experts, K, N], scales [experts, N], rows of each expert, expert of each row) -> [T*k, N]"""

    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.quantize, self.product = gen_ops_prim.DynamicQuantExt(), GroupedProduct()
        self.gather, self.mul = gen_ops_prim.Gather(), ops.Mul()
        self.cast, self.reshape = ops.Cast(), ops.Reshape()
        self.dtype = dtype

    def construct(
        self, x: ms.Tensor, codes: ms.Tensor, scales: ms.Tensor, counts: ms.Tensor, numbers: ms.Tensor
    ) -> ms.Tensor:
        rows, row_scales = self.quantize(x, None)
        sums = self.cast(self.product(rows, codes, counts), ms.float32)
        scaled = self.mul(sums, self.gather(scales, numbers, 0))
        return self.cast(self.mul(scaled, self.reshape(row_scales, (-1, 1))), self.dtype)


class QuantizedExperts(nn.Cell):
    """As `Experts`, where each weight is codes int8 [experts, K, N] and scales float32 [experts, N].

    Args:
        num_experts: Of the layer.
        gate: (x [T, 2*I]) -> [T, I]
        dtype: Of x and of the result.
    """

    def __init__(self, num_experts: int, gate: nn.Cell, dtype: Any) -> None:
        super().__init__()
        self.gate = gate
        self.dispatch, self.combine = Dispatch(num_experts), gen_ops_prim.MoeTokenUnpermute()
        self.product = QuantizedProduct(dtype)
        self.cast, self.reshape = ops.Cast(), ops.Reshape()

    def construct(self, x: ms.Tensor, shares: ms.Tensor, chosen: ms.Tensor, gate_up: Any, down: Any) -> ms.Tensor:
        rows, places, counts = self.dispatch(x, chosen)
        counts = self.cast(counts, ms.int64)
        # The numbers of the experts, sorted as the rows are that they belong to.
        each = self.reshape(chosen, (-1, 1))
        numbers, _, _ = self.dispatch(self.cast(each, ms.float32), each)
        numbers = self.reshape(self.cast(numbers, ms.int32), (-1,))
        rows = self.gate(self.product(rows, gate_up[0], gate_up[1], counts, numbers))
        return self.combine(self.product(rows, down[0], down[1], counts, numbers), places, shares, False, None)
