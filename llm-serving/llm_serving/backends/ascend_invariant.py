"""The Ascend backend with batch-invariant products.

MindSpore's MatMul may split its sums differently for each batch shape. `ms_custom_ops`, a package for devices, has a
batch-invariant product, which MindFormers also uses (`VLLM_BATCH_INVARIANT`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import nn, ops

from llm_serving.backends.ascend import AscendBackend
from llm_serving.errors import KernelError

PACKAGE = "ms_custom_ops"
PRODUCT = "matmul_batch_invariant"


class AscendInvariantBackend(AscendBackend):
    """As `AscendBackend`, with batch-invariant products. No other operation of a step adds over
    rows of several requests.
    """

    name = "ascend_invariant"

    def __init__(self, dtype: str) -> None:
        super().__init__(dtype)
        try:
            self._product = getattr(importlib.import_module(PACKAGE), PRODUCT)
        except (ImportError, AttributeError) as error:
            raise KernelError(f"batch-invariant products need {PACKAGE}.{PRODUCT}: {error}") from None

    def linear(self) -> nn.Cell:
        return InvariantProduct(self._product)

    def logits(self) -> nn.Cell:
        return InvariantProduct(self._product, ms.float32)


class InvariantProduct(nn.Cell):
    """(x [T, K], weight [N, K]) -> [T, N] = x @ weight.T.

    Args:
        product: (x [T, K], y [K, N]) -> x @ y; it takes no transposed weight.
        dtype: Type of the result; None: the type of x.
    """

    def __init__(self, product: Callable[..., Any], dtype: Any = None) -> None:
        super().__init__()
        self.product = product
        self.transpose = ops.Transpose()
        self.cast = ops.Cast()
        self.dtype = dtype

    def construct(self, x: ms.Tensor, weight: ms.Tensor) -> ms.Tensor:
        y = self.product(x, self.transpose(weight, (1, 0)))
        return y if self.dtype is None else self.cast(y, self.dtype)
