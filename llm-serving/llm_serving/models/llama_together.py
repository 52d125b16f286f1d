"""A Llama as one operation of a backend that has it."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from llm_serving.backends.base import Array, Backend
from llm_serving.core.model_spec import ModelSpec
from llm_serving.layers.rotary import cos_sin_tables, inverse_frequencies
from llm_serving.models.base import KVCaches
from llm_serving.models.llama_weights import LayerWeights, LlamaWeights


class LlamaTogether(nn.Cell):
    """The arguments of a step (`models.base.STEP_INPUTS`) -> logits.

    Args:
        spec: The model.
        backend: Makes Parameters.
        operation: From `Backend.decoder`.
        weights: Those of the model.
        kv_caches: One pair for each layer.
        max_positions: Longest context of a row, in tokens.
    """

    def __init__(
        self,
        spec: ModelSpec,
        backend: Backend,
        operation: nn.Cell,
        weights: LlamaWeights,
        kv_caches: KVCaches,
        max_positions: int,
    ) -> None:
        super().__init__()
        self.operation = operation
        self.table = weights.table
        cos, sin = cos_sin_tables(inverse_frequencies(spec), max_positions)
        self.cos, self.sin = backend.table(cos, "cos"), backend.table(sin, "sin")
        self.gain = backend.vector(weights.gains[-1], name="gain")
        parameters: list[ms.Parameter] = []
        for index, (gain, layer, kv_cache) in enumerate(
            zip(weights.gains[:-1], weights.layers(), kv_caches, strict=True)
        ):
            parameters += [*_as_parameters(backend, f"layers.{index}", gain, layer), *kv_cache]
        self.layers = ms.ParameterTuple(parameters)
        self.head = weights.head()

    def construct(
        self,
        token_ids: ms.Tensor,
        positions: ms.Tensor,
        slot_mapping: ms.Tensor,
        block_tables: ms.Tensor,
        query_lens: ms.Tensor,
        context_lens: ms.Tensor,
        sample_indices: ms.Tensor,
    ) -> ms.Tensor:
        step = token_ids, positions, slot_mapping, block_tables, query_lens, context_lens, sample_indices
        return self.operation(*step, self.table, self.cos, self.sin, self.gain, self.head, *self.layers)


def _as_parameters(backend: Backend, name: str, gain: Array, weights: LayerWeights) -> list[ms.Parameter]:
    """What `Backend.decoder` takes of a layer before its caches."""
    projections = {field: getattr(weights, field) for field in ("qkv", "out", "gate_up", "down")}
    biases = [projection.bias for projection in projections.values() if projection.bias is not None]
    return [
        backend.vector(gain, weights.mlp_gain, *biases, name=f"{name}.vectors"),
        *(backend.linear_weight(each.weight, f"{name}.{field}") for field, each in projections.items()),
    ]
