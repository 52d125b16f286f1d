"""Both ends of a language model: ids to vectors, and vectors of the sampled rows to logits."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from llm_serving.backends.base import Backend


class Embedding(nn.Cell):
    """ids int32[T] -> the rows of a table [R, H] they name, [T, H]"""

    def __init__(self, backend: Backend, table: ms.Parameter) -> None:
        super().__init__()
        self.table = table
        self.look_up = backend.embedding()

    def construct(self, ids: ms.Tensor) -> ms.Tensor:
        return self.look_up(ids, self.table)


class SampledLogits(nn.Cell):
    """normed hidden [T, H], sample_indices int32[S] -> float32 [S, V]; other rows do not reach the head.

    Args:
        backend: Makes the operations.
        weight: [V, H] from `Backend.linear_weight`; the embedding table itself where the two are tied.
    """

    def __init__(self, backend: Backend, weight: ms.Parameter) -> None:
        super().__init__()
        self.select = backend.embedding()
        self.weight = weight
        self.logits = backend.logits()

    def construct(self, normed: ms.Tensor, sample_indices: ms.Tensor) -> ms.Tensor:
        return self.logits(self.select(sample_indices, normed), self.weight)
