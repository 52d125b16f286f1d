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
