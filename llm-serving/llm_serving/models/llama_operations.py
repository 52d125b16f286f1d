"""A Llama made of the operations of a backend."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from llm_serving.backends.ascend import AscendBackend
from llm_serving.backends.base import Array, Backend
from llm_serving.core.model_spec import ModelSpec
from llm_serving.layers.attention import PagedSelfAttention, head_sizes
from llm_serving.layers.embedding import Embedding
from llm_serving.layers.linear import Linear
from llm_serving.layers.mlp import GatedMlp
from llm_serving.layers.norm import AddRmsNorm, RmsNorm
from llm_serving.layers.rotary import RotaryTables
from llm_serving.layers.selection import EveryRow, SampledRows
from llm_serving.models.base import KVCaches
from llm_serving.models.llama_weights import LayerWeights, LlamaWeights, Projection


class LlamaOfOperations(nn.Cell):
    """The arguments of a step (`models.base.STEP_INPUTS`) -> logits.

    A residual and the norm after it are one operation, so each layer also owns the norm that follows it. Of a row that
    does not sample, only keys and values are ever read again: the last layer leaves it out behind attention.

    Args:
        spec: The model.
        backend: Makes operations and Parameters.
        weights: Those of the model.
        kv_caches: One pair for each layer.
        max_positions: Longest context of a row, in tokens.
    """

    def __init__(
        self, spec: ModelSpec, backend: Backend, weights: LlamaWeights, kv_caches: KVCaches, max_positions: int
    ) -> None:
        super().__init__()
        self.head_sizes = head_sizes(spec)
        self.embedding = Embedding(backend, weights.table)
        self.rotary_tables = RotaryTables(backend, spec, max_positions)
        self.norm = RmsNorm(backend, weights.gains[0], spec.rms_norm_eps)
        selections = [EveryRow()] * (spec.num_hidden_layers - 1) + [SampledRows(backend)]
        parts = zip(weights.layers(), weights.gains[1:], kv_caches, selections, strict=True)
        self.layers = nn.CellList([LlamaLayer(spec, backend, *part) for part in parts])
        self.head = weights.head()
        self.logits = backend.logits()

    def use_whole_prompts(self, backend: AscendBackend) -> None:
        """Makes the graph compiled next, under a `phase` of its own, one for steps of whole prompts only.

        It shares every weight with the graph compiled before. B is fixed in it; unused rows have length 0.
        """
        for layer in self.layers:
            layer.attention.attention = backend.prompt_attention(*self.head_sizes)

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
        hidden = self.embedding(token_ids)
        cos, sin = self.rotary_tables(positions)
        step = slot_mapping, block_tables, query_lens, context_lens, sample_indices
        normed = self.norm(hidden)
        for layer in self.layers:
            normed, hidden = layer(normed, hidden, cos, sin, *step)
        return self.logits(normed, self.head)


class LlamaLayer(nn.Cell):
    """(normed [T, H], hidden [T, H]) -> the same for the next layer: attention, then feed-forward.

    Args:
        spec: The model.
        backend: Makes operations and Parameters.
        weights: Those of the layer.
        next_gain: Gain of the norm that follows this layer.
        kv_cache: Key and value cache of this layer.
        selection: Of the rows that are computed after attention: (x, sample_indices) -> x.
    """

    def __init__(
        self,
        spec: ModelSpec,
        backend: Backend,
        weights: LayerWeights,
        next_gain: Array,
        kv_cache: tuple[ms.Parameter, ms.Parameter],
        selection: nn.Cell,
    ) -> None:
        super().__init__()

        def linear(projection: Projection) -> Linear:
            return Linear(backend, projection.weight, projection.bias)

        self.attention = PagedSelfAttention(backend, spec, linear(weights.qkv), kv_cache)
        self.selection = selection
        self.out = linear(weights.out)
        self.mlp_norm = AddRmsNorm(backend, weights.mlp_gain, spec.rms_norm_eps)
        self.mlp = GatedMlp(backend, linear(weights.gate_up), linear(weights.down))
        self.next_norm = AddRmsNorm(backend, next_gain, spec.rms_norm_eps)

    def construct(
        self,
        normed: ms.Tensor,
        hidden: ms.Tensor,
        cos: ms.Tensor,
        sin: ms.Tensor,
        slot_mapping: ms.Tensor,
        block_tables: ms.Tensor,
        query_lens: ms.Tensor,
        context_lens: ms.Tensor,
        sample_indices: ms.Tensor,
    ) -> tuple[ms.Tensor, ms.Tensor]:
        attended = self.attention(normed, cos, sin, slot_mapping, block_tables, query_lens, context_lens)
        attended = self.selection(attended, sample_indices)
        hidden = self.selection(hidden, sample_indices)
        normed, hidden = self.mlp_norm(self.out(attended), hidden)
        normed, hidden = self.next_norm(self.mlp(normed), hidden)
        return normed, hidden
