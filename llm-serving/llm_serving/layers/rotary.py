"""Rotary position embedding (Su et al. 2021, RoFormer): cosines and sines of every position, computed once."""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
from mindspore import nn
from numpy.typing import NDArray

from llm_serving.backends.base import Backend
from llm_serving.core.model_spec import ModelSpec, RopeScaling
from llm_serving.layers.embedding import Embedding

Float64Array = NDArray[np.float64]


class RotaryTables(nn.Cell):
    """positions int32[T] -> cos, sin, each [T, head_dim] in the model dtype with two equal halves.

    Args:
        backend: Makes tables and look-ups.
        spec: The model.
        max_positions: Positions the tables have.
    """

    def __init__(self, backend: Backend, spec: ModelSpec, max_positions: int) -> None:
        super().__init__()
        cos, sin = cos_sin_tables(inverse_frequencies(spec), max_positions)
        self.cos = Embedding(backend, backend.table(cos))
        self.sin = Embedding(backend, backend.table(sin))

    def construct(self, positions: ms.Tensor) -> tuple[ms.Tensor, ms.Tensor]:
        return self.cos(positions), self.sin(positions)


def inverse_frequencies(spec: ModelSpec) -> Float64Array:
    """Angle per position of each pair of elements: theta^(-2i/D), i < D/2 (RoFormer equation 15), scaled as asked.

    Returns:
        [head_dim / 2], radians per position.
    """
    exponents = np.arange(0, spec.head_dim, 2, dtype=np.float64) / spec.head_dim
    frequencies = spec.rope_theta**-exponents
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3_scaled(frequencies, scaling)


def _llama3_scaled(frequencies: Float64Array, scaling: RopeScaling) -> Float64Array:
    """Slow rotations are slowed down by `factor`, fast ones stay, those between are mixed linearly.

    As `apply_scaling` of the Llama 3.1 reference code (meta-llama/llama-models, models/llama3/reference_impl).
    """
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # 0 where the wavelength is original/low or longer, 1 where it is original/high or shorter.
    share_kept = np.clip((scaling.original_max_position_embeddings / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1 - share_kept) * frequencies / scaling.factor + share_kept * frequencies


def cos_sin_tables(frequencies: Float64Array, num_positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosine and sine of position * frequency, computed in float64 and rounded once.

    Returns:
        Two tables [num_positions, head_dim] whose halves are equal.
    """
    angles = np.outer(np.arange(num_positions, dtype=np.float64), frequencies)
    cos, sin = (np.tile(function(angles).astype(np.float32), 2) for function in (np.cos, np.sin))
    return cos, sin
