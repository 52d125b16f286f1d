"""Root mean square normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from llm_serving.backends.base import Array, Backend


class RmsNorm(nn.Cell):
    """x [T, H] -> x / sqrt(mean(x^2) + eps) * gain"""

    def __init__(self, backend: Backend, gain: Array, eps: float) -> None:
        super().__init__()
        self.gain = backend.vector(gain)
        self.norm = backend.rms_norm(eps)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.norm(x, self.gain)


class AddRmsNorm(nn.Cell):
    """(x [T, H], y [T, H]) -> (the norm of x + y, x + y): a residual joins, and what follows it is normalised."""

    def __init__(self, backend: Backend, gain: Array, eps: float) -> None:
        super().__init__()
        self.gain = backend.vector(gain)
        self.norm = backend.add_rms_norm(eps)

    def construct(self, x: ms.Tensor, y: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor]:
        normed, total = self.norm(x, y, self.gain)
        return normed, total
