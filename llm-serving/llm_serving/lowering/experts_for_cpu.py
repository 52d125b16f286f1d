"""The operations of `mindspore.mint` and `mindspore.ops` that MindFormers' experts call, for a CPU.

MindSpore 2.10 has no kernels on a CPU for TopkExt and IndexSelect, nor for MaskedFill and NanToNum in bfloat16. The
functions of this module give the same results by operations that have kernels. MindSpore's parser imports the module
that a function names, so MindFormers' modules get this module in place of `mint` and `ops`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import mindspore as ms
from mindspore import ops
from mindspore.mint import add, div, mul, sigmoid, softmax, sum, zeros, zeros_like
from mindspore.ops import Cast

__all__ = ["Cast", "add", "div", "mul", "sigmoid", "softmax", "sum", "zeros", "zeros_like"]

_EXPERTS: Final = "mindformers.parallel_core.inference.transformer.moe"
REPLACED: Final[Mapping[str, tuple[str, ...]]] = {
    f"{_EXPERTS}.moe_utils": ("mint",),
    f"{_EXPERTS}.token_dispatcher": ("mint", "ops"),
}
"""Module of MindFormers -> its names that this module replaces."""


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
