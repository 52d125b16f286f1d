"""Learned embeddings of positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llm_serving.network.operations import BY_TOKEN, Float32Array, Value, Weight

if TYPE_CHECKING:
    from llm_serving.network.builder import Network


@dataclass(frozen=True)
class PositionEmbedding:
    """A learned embedding of positions, to which an embedding of token types is added.

    Attributes:
        name, types: Tensor name prefixes of both tables, [first + num_positions, H] and [num_types, H].
        first: Row of the table for position 0.
    """

    name: str
    types: str
    num_positions: int
    num_types: int
    first: int = 0

    def table(self, hidden: int) -> Weight:
        """Return the sums of both embeddings, [num_types * num_positions, H]: all positions with the first token type,
        then all positions with the second.
        """
        stored = (self.first + self.num_positions, hidden), (self.num_types, hidden)
        shape = (self.num_types * self.num_positions, hidden)
        return Weight((f"{self.name}.weight", f"{self.types}.weight"), shape, stored, transform=self.sums)

    def sums(self, stack: Float32Array) -> Float32Array:
        positions, types = stack[self.first : -self.num_types], stack[-self.num_types :]
        return np.concatenate([positions + each for each in types])


def position_embedding(net: Network, positions: PositionEmbedding) -> Value:
    """Look up rows of a table by position and, if there are several token types, by type."""
    net.positions = positions
    attributes = {**BY_TOKEN, "of_positions": True}
    return net.record("embedding", {}, {"table": positions.table(net.hidden)}, attributes)
