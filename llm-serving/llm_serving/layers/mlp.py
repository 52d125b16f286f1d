"""The gated feed-forward half of a decoder layer (SwiGLU, Shazeer 2020)."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from llm_serving.backends.base import Backend
from llm_serving.layers.linear import Linear


class GatedMlp(nn.Cell):
    """x [T, H] -> down(silu(gate(x)) * up(x)), with gate and up as one product.

    Args:
        backend: Makes the operations.
        gate_up: H -> 2 * I, gate first.
        down: I -> H.
    """

    def __init__(self, backend: Backend, gate_up: Linear, down: Linear) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.swiglu = backend.swiglu()
        self.down = down

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.down(self.swiglu(self.gate_up(x)))
