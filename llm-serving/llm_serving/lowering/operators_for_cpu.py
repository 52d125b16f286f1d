"""Operations that MindFormers' classes call and MindSpore 2.10 lacks on a CPU.

MindSpore has no kernels on a CPU for TopkExt, IndexSelect and FusedAddTopKDiv, nor for MaskedFill and NanToNum in
bfloat16. The order of sums in its BatchMatMul depends on the number of rows. The functions of this module give the same
results by operations that have kernels. `REPLACED` puts this module in place of `mint` and `ops` in MindFormers'
modules, where `mint.topk` is then `topk` below. It must be a module, because MindSpore's parser imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import mindspore as ms
from mindspore import nn, ops
from mindspore.mint import add, div, mul, sigmoid, softmax, sum, zeros, zeros_like
from mindspore.ops import Cast

from llm_serving.backends.ascend_experts import GroupedMatmul

__all__ = ["Cast", "add", "div", "mul", "sigmoid", "softmax", "sum", "zeros", "zeros_like"]


def topk(x: ms.Tensor, k: int, dim: int) -> tuple[ms.Tensor, ms.Tensor]:
    """Return the k largest values of each row in descending order, and their indices, both [.., k]. `dim`: -1."""
    values, indices = ops.topk(x, k, dim)
    return values, indices


def index_select(x: ms.Tensor, dim: int, index: ms.Tensor) -> ms.Tensor:
    return ops.gather(x, index, dim)


def masked_fill(x: ms.Tensor, mask: ms.Tensor, value: ms.Tensor) -> ms.Tensor:
    return ops.masked_fill(x.astype(ms.float32), mask, value.astype(ms.float32)).astype(x.dtype)


def nan_to_num(x: ms.Tensor, nan: float, posinf: float, neginf: float) -> ms.Tensor:
    """Return x with `nan`, `posinf` and `neginf` in place of NaN and of positive and negative infinity."""
    return ops.nan_to_num(x.astype(ms.float32), nan, posinf, neginf).astype(x.dtype)


def group_limited_topk(
    scores: ms.Tensor, topk: int, num_experts: int, num_groups: int, group_topk: int
) -> tuple[ms.Tensor, ms.Tensor]:
    """Return the `topk` largest scores of each row in its best `group_topk` groups of experts, and their indices. The
    score of a group is the sum of its best `topk // group_topk` scores.
    """
    size = num_experts // num_groups
    grouped = ops.reshape(scores, (-1, num_groups, size))
    best, _ = ops.topk(grouped, topk // group_topk, -1)
    _, chosen = ops.topk(sum(best, -1), group_topk, -1)
    taken = ops.one_hot(chosen, num_groups, ms.Tensor(1.0, ms.float32), ms.Tensor(0.0, ms.float32))
    limited = grouped * ops.expand_dims(sum(taken, 1), -1)
    values, indices = ops.topk(ops.reshape(limited, (-1, num_experts)), topk, -1)
    return values, indices


def _add_topk_div(
    x: ms.Tensor,
    correction: ms.Tensor,
    num_groups: int,
    group_topk: int,
    num_of_group: int,
    k: int,
    activation: int,
    normalises: bool,
    scale: float,
) -> tuple[ms.Tensor, ms.Tensor]:
    """Compute FusedAddTopKDiv with a sigmoid, normalised weights and `num_of_group` = k // group_topk, as MindFormers
    calls it. Return the weights of the chosen experts, float32 [rows, k], and their indices, int32.
    """
    scores = sigmoid(x)
    corrected = add(scores, ops.expand_dims(correction, 0))
    _, indices = group_limited_topk(corrected, k, x.shape[1], num_groups, group_topk)
    weights = ops.gather_d(scores, 1, indices)
    weights = mul(div(weights, add(sum(weights, -1, True), 1e-20)), scale)
    return weights, indices.astype(ms.int32)


def fused_add_topk_div() -> Callable[..., tuple[ms.Tensor, ms.Tensor]]:
    """Return a function that computes FusedAddTopKDiv. MindFormers calls this like the operator's constructor."""
    return _add_topk_div


class HeadProducts(nn.Cell):
    """Multiplies x [heads, T, K] by a matrix for each head (from `Backend.expert_weights`). Returns [heads, T, N]."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.multiply, self.reshape, self.fill = GroupedMatmul(), ops.Reshape(), ops.FillV2()

    def construct(self, x: ms.Tensor, weight: ms.Tensor) -> ms.Tensor:
        _, rows, columns = x.shape
        counts = self.fill((self.heads,), ops.scalar_to_tensor(rows, ms.int64))
        y = self.multiply(self.reshape(x, (-1, columns)), weight, counts)
        return self.reshape(y, (self.heads, -1, weight.shape[2]))


_EXPERTS: Final = "mindformers.parallel_core.inference.transformer.moe"
_THIS: Final = sys.modules[__name__]
REPLACED: Final[Mapping[str, Mapping[str, Any]]] = {
    f"{_EXPERTS}.moe_utils": {
        "mint": _THIS,
        "group_limited_topk": group_limited_topk,
        "FusedAddTopKDiv": fused_add_topk_div,
    },
    f"{_EXPERTS}.token_dispatcher": {"mint": _THIS, "ops": _THIS},
}
"""Module of MindFormers -> its names that are replaced on a CPU."""
