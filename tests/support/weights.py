"""Weights of a network assembled from the tensors that store them."""

from typing import Any, Protocol

import numpy as np
from llm_serving.network.operations import Weight
from llm_serving.network.weights import assemble_weight

Array = np.ndarray[Any, Any]


class Tensors(Protocol):
    def read(self, name: str, shape: tuple[int, ...]) -> Array:
        """Return a tensor of this shape, possibly as a read-only memory map."""


def load_parameter(weight: Weight, tensors: Tensors, num_positions: int) -> Array:
    """Return a weight as an array of `weight.shape`, of a stored type or float32. Generated tables have `num_positions`
    rows (the longest served context).
    """
    if weight.generate is not None:
        return weight.generate(num_positions)
    stored = zip(weight.names, weight.stored_shapes, strict=True)
    return assemble_weight(weight, [tensors.read(name, shape) for name, shape in stored])
