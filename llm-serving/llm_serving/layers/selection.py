"""Which rows of a step are computed further."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from llm_serving.backends.base import Backend


class EveryRow(nn.Cell):
    """(x [T, N], sample_indices int32[S]) -> x"""

    def construct(self, x: ms.Tensor, sample_indices: ms.Tensor) -> ms.Tensor:
        return x


class SampledRows(nn.Cell):
    """(x [T, N], sample_indices int32[S]) -> [S, N], the rows that sample"""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.look_up = backend.embedding()

    def construct(self, x: ms.Tensor, sample_indices: ms.Tensor) -> ms.Tensor:
        return self.look_up(sample_indices, x)
