"""What every model family offers: a network that takes the arrays of one step and returns logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import mindspore as ms
from mindspore import nn

from llm_serving.backends.base import Backend
from llm_serving.core.model_spec import ModelSpec
from llm_serving.models.weights import WeightReader

KVCaches = Sequence[tuple[ms.Parameter, ms.Parameter]]
"""Key and value cache of each layer."""

STEP_INPUTS: Final = (
    ("token_ids", 1),  # [T]
    ("positions", 1),  # [T]
    ("slot_mapping", 1),  # [T]
    ("block_tables", 2),  # [B, W]
    ("query_lens", 1),  # [B]
    ("context_lens", 1),  # [B]
    ("sample_indices", 1),  # [S]
)
"""Name and rank of the arguments of `construct`, all int32; the result is float32 [S, vocab_size]."""


class ModelFamily(Protocol):
    """What builds the networks of a family, as the registry names it."""

    def __call__(
        self, spec: ModelSpec, backend: Backend, reader: WeightReader, kv_caches: KVCaches, max_positions: int
    ) -> nn.Cell:
        """Builds the network and takes every weight it needs.

        Args:
            spec: The model.
            backend: Makes operations and Parameters.
            reader: Of a folder that is read once, in the order of the layers.
            kv_caches: One pair for each layer.
            max_positions: Longest context of a row, in tokens.

        Raises:
            ModelError: The folder lacks a tensor, has one of another shape, or one too many.
        """


def dynamic_inputs(num_rows: int | None = None) -> list[ms.Tensor]:
    """Arguments of every shape, for `Cell.set_inputs`: one compilation serves all batches.

    Args:
        num_rows: B, for a graph in which it is fixed.
    """
    sizes = {"block_tables": (num_rows, None), "query_lens": (num_rows,), "context_lens": (num_rows,)}
    return [ms.Tensor(shape=list(sizes.get(name, (None,) * rank)), dtype=ms.int32) for name, rank in STEP_INPUTS]
