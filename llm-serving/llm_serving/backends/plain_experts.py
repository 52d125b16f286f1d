"""Mixture of experts as MindSpore's own operations. Every expert computes every row, and most weights are zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops


class PlainRouter(nn.Cell):
    """Computes the weights of all experts: logits [T, experts] -> float32 [T, experts], zero for experts that are not
    chosen.

    The tensor is returned twice, because `Backend.route` returns two tensors.
    """

    def __init__(self, attributes: Mapping[str, Any], num_experts: int, correction: ms.Parameter | None) -> None:
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
        """Return the rank of each score in its row: the number of scores that are larger, or equal with a lower index.

        `numbers`: index of each score.
        """
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
    """Adds the weighted results in the order of expert numbers.

    Args:
        product: (x [T, K], weight [N, K]) -> [T, N]
        gate: (x [T, 2*I]) -> [T, I]
    """

    def __init__(self, product: nn.Cell, gate: nn.Cell) -> None:
        super().__init__()
        self.product, self.gate = product, gate

    def construct(self, x: ms.Tensor, topk_weights: ms.Tensor, _: ms.Tensor, gate_up: Any, down: Any) -> ms.Tensor:
        total = ops.zeros_like(x)
        for number in range(len(gate_up)):
            inner = self.gate(self.product(x, gate_up[number]))
            total = total + topk_weights[:, number : number + 1] * self.product(inner, down[number])
        return total
