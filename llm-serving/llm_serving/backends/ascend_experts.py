"""Experts as the primitives an Ascend device has, called as MindFormers and others call them.

Rows are sorted by expert, those of an expert are multiplied together, and come back with their shares. A product is
rounded to the model dtype, a sum once more.
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


class Experts(nn.Cell):
    """(x [T, H], shares, chosen, gate_up [experts, H, 2*I], down [experts, I, H]) -> [T, H]

    Args:
        num_experts: Of the layer.
        gate: (x [T, 2*I]) -> [T, I]
    """

    def __init__(self, num_experts: int, gate: nn.Cell) -> None:
        super().__init__()
        self.gate = gate
        self.dispatch, self.combine = gen_ops_prim.MoeInitRoutingV2(), gen_ops_prim.MoeTokenUnpermute()
        self.multiply = gen_ops_prim.GroupedMatmulV4()
        self.cast = ops.Cast()
        self.num_experts = num_experts

    def product(self, x: ms.Tensor, weight: ms.Tensor, counts: ms.Tensor) -> ms.Tensor:
        absent = None, None, None, None, None, None
        return self.multiply([x], [weight], *absent, counts, None, None, None, _ONE_TENSOR, _BY_ROWS, _COUNTS)[0]

    def construct(self, x: ms.Tensor, shares: ms.Tensor, chosen: ms.Tensor, gate_up: Any, down: Any) -> ms.Tensor:
        rows, places, counts, _ = self.dispatch(x, chosen, 0, 0, self.num_experts, 0, 2, True)
        counts = self.cast(counts, ms.int64)
        rows = self.product(self.gate(self.product(rows, gate_up[0], counts)), down[0], counts)
        return self.combine(rows, places, shares, False, None)
