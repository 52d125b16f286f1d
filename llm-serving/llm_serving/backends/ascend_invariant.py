"""The Ascend backend whose results do not depend on the batch.

MindSpore's MatMul may split its sums differently for each batch shape. `ms_custom_ops`, a package for Ascend devices,
has a batch-invariant matrix product, which MindFormers also uses (`VLLM_BATCH_INVARIANT`). The product needs the CANN
package `ops-batchinvariant`.

PagedAttention splits the heads and keys of a row over the cores in a way that depends on the number of rows. In one
case it does not: if each row is a request with one token, and the number of rows is a multiple of the number of cores,
one core computes each row with all its keys. So this backend computes each token of a prompt as a request with one
token. The kernel for requests with several tokens would add in another order.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from llm_serving.backends.ascend import AscendBackend
from llm_serving.backends.base import Array
from llm_serving.errors import KernelError, ModelError

PACKAGE = "ms_custom_ops"
PRODUCT = "matmul_batch_invariant"
CANN_PACKAGE: Final = "custom_batchinvariant"
"""Folder of the CANN package `ops-batchinvariant`. Without its kernels, calls of `InvariantProduct` fail."""


class AscendInvariantBackend(AscendBackend):
    """An `AscendBackend` with batch-invariant products and attention. Raise KernelError if a package is missing."""

    name = "ascend_invariant"
    attention_rows = 120  # a multiple of 20 and 24, the numbers of cube cores of the chips of the series A2 and A3

    def __init__(self, dtype: str) -> None:
        super().__init__(dtype)
        try:
            self._product = getattr(importlib.import_module(PACKAGE), PRODUCT)
        except (ImportError, AttributeError, OSError, RuntimeError) as error:
            raise KernelError(
                f"batch-invariant matrix products need the operator {PACKAGE}.{PRODUCT}: {error}"
            ) from None
        if not has_cann_package(os.environ):
            raise KernelError(
                f"batch-invariant products need the CANN package ops-batchinvariant: there is no folder {CANN_PACKAGE} "
                "in ASCEND_CUSTOM_OPP_PATH or in the folder opp/vendors of CANN"
            )

    def linear(self) -> nn.Cell:
        return InvariantProduct(self._product)

    def logits(self) -> nn.Cell:
        return InvariantProduct(self._product, ms.float32)

    def linear_weight(self, array: Array, name: str | None = None) -> ms.Parameter:
        """Return a Parameter [K, N], because the batch-invariant product takes no transposed weight."""
        return self._copy(np.ascontiguousarray(array.T), name)

    def tied_weight(self, array: Array, name: str | None = None) -> ms.Parameter:
        if array.shape[0] == array.shape[1]:  # the product could not tell whether it is transposed
            raise ModelError(
                "`vocab_size` must differ from `hidden_size` for batch-invariant products, because the shape of a tied "
                f"weight must show whether it is transposed. Given: {len(array)} for both"
            )
        return self._copy(array, name)


def has_cann_package(environment: Mapping[str, str]) -> bool:
    custom = (Path(each) for each in environment.get("ASCEND_CUSTOM_OPP_PATH", "").split(":") if each)
    if any(each.name == CANN_PACKAGE and each.is_dir() for each in custom):
        return True
    homes = (environment.get(name) for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"))
    folders = [Path(home, "opp") for home in homes if home]
    folders += [Path(each) for each in (environment.get("ASCEND_OPP_PATH"),) if each]
    return any((folder / "vendors" / CANN_PACKAGE).is_dir() for folder in folders)


class InvariantProduct(nn.Cell):
    """(x [T, K], weight [K, N] or [N, K]) -> the product [T, N], in the type `dtype`, or that of x if `dtype` is None.

    `product` is the batch-invariant operator. Because it needs a weight [K, N], each step transposes a weight [N, K],
    such as an LM head that is also the token embedding.
    """

    def __init__(self, product: Callable[..., Any], dtype: Any = None) -> None:
        super().__init__()
        self.product = product
        self.transpose = ops.Transpose()
        self.cast = ops.Cast()
        self.dtype = dtype

    def construct(self, x: ms.Tensor, weight: ms.Tensor) -> ms.Tensor:
        if weight.shape[0] != x.shape[1]:
            weight = self.transpose(weight, (1, 0))
        y = self.product(x, weight)
        return y if self.dtype is None else self.cast(y, self.dtype)
