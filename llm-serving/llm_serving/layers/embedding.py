"""The first end of a language model: ids to vectors."""

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
