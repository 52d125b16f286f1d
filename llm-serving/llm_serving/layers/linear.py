"""A matrix product with its weight, and a bias where the model has one."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops

from llm_serving.backends.base import Array, Backend


class Linear(nn.Cell):
    """x [T, K] -> [T, N] = x @ weight.T + bias

    Args:
        backend: Makes the product.
        weight: [N, K]; several projections of the same input may be stacked along N.
        bias: [N] or None.
    """

    def __init__(self, backend: Backend, weight: Array, bias: Array | None = None) -> None:
        super().__init__()
        self.weight = backend.linear_weight(weight)
        self.product = backend.linear()
        self.has_bias = bias is not None
        if bias is not None:
            # Sums of backends take two tensors of one shape: the bias is looked up once for each row.
            self.bias = backend.table(bias[None, :])
            self.repeat = backend.embedding()
            self.add = backend.add()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        x = self.product(x, self.weight)
        if self.has_bias:
            first_row = ops.zeros((x.shape[0],), ms.int32)
            x = self.add(x, self.repeat(first_row, self.bias))
        return x
