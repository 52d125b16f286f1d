"""The Llama family: Llama 2 and 3 in every size, and models of the same shape.

Grouped queries or not, tied embeddings or not, biases or not, scaled rotary embedding or not: `ModelSpec` says.
"""

from __future__ import annotations

import mindspore as ms
from mindspore import nn

from llm_serving.backends.ascend import AscendBackend
from llm_serving.backends.base import Array, Backend
from llm_serving.core.model_spec import ModelSpec
from llm_serving.layers.attention import PagedSelfAttention, head_sizes
from llm_serving.layers.embedding import Embedding, SampledLogits
from llm_serving.layers.linear import Linear
from llm_serving.layers.mlp import GatedMlp
from llm_serving.layers.norm import AddRmsNorm, RmsNorm
from llm_serving.layers.rotary import RotaryTables
from llm_serving.models.base import KVCaches
from llm_serving.models.weights import WeightReader


class LlamaForCausalLM(nn.Cell):
    """A `models.base.ModelFamily`."""

    def __init__(
        self, spec: ModelSpec, backend: Backend, weights: WeightReader, kv_caches: KVCaches, max_positions: int
    ) -> None:
        super().__init__()
        self.spec = spec
        table_shape = (spec.vocab_size, spec.hidden_size)
        embed_tokens = weights.take("model.embed_tokens.weight", table_shape)
        # A tied table is a factor of the last product as well; look-ups accept that order of elements.
        table = backend.linear_weight(embed_tokens) if spec.tie_word_embeddings else backend.table(embed_tokens)
        self.embedding = Embedding(backend, table)
        self.rotary_tables = RotaryTables(backend, spec, max_positions)
        num_layers = spec.num_hidden_layers
        # A residual and the norm after it are one operation, so each layer also owns the norm that follows it.
        gains = [f"model.layers.{index}.input_layernorm.weight" for index in range(num_layers)] + ["model.norm.weight"]
        self.norm = RmsNorm(backend, weights.take(gains[0], (spec.hidden_size,)), spec.rms_norm_eps)
        self.layers = nn.CellList(
            [
                LlamaLayer(spec, backend, weights, f"model.layers.{index}", gains[index + 1], kv_caches[index])
                for index in range(num_layers)
            ]
        )
        if spec.tie_word_embeddings:
            head = table
            if "lm_head.weight" in weights:  # some exporters write the table twice
                weights.take("lm_head.weight", table_shape)
        else:
            head = backend.linear_weight(weights.take("lm_head.weight", table_shape))
        self.logits = SampledLogits(backend, head)
        weights.check_all_taken()

    def use_whole_prompts(self, backend: AscendBackend) -> None:
        """Makes the graph compiled next, under a `phase` of its own, one for steps of whole prompts only.

        It shares every weight with the graph compiled before. B is fixed in it; unused rows have length 0.
        """
        for layer in self.layers:
            layer.attention.attention = backend.prompt_attention(*head_sizes(self.spec))

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
        normed = self.norm(hidden)
        for layer in self.layers:
            normed, hidden = layer(normed, hidden, cos, sin, slot_mapping, block_tables, query_lens, context_lens)
        return self.logits(normed, sample_indices)


class LlamaLayer(nn.Cell):
    """(normed [T, H], hidden [T, H]) -> the same for the next layer: attention, then feed-forward.

    Args:
        spec: The model.
        backend: Makes operations and Parameters.
        weights: Where the weights come from.
        name: Prefix of this layer's weights.
        next_gain: Name of the gain of the norm that follows this layer.
        kv_cache: Key and value cache of this layer.
    """

    def __init__(
        self,
        spec: ModelSpec,
        backend: Backend,
        weights: WeightReader,
        name: str,
        next_gain: str,
        kv_cache: tuple[ms.Parameter, ms.Parameter],
    ) -> None:
        super().__init__()
        hidden, inner = spec.hidden_size, spec.intermediate_size

        def linear(parts: dict[str, int], num_inputs: int, has_bias: bool) -> Linear:
            weight = weights.take_rows([(f"{name}.{part}.weight", rows) for part, rows in parts.items()], num_inputs)
            bias: Array | None = None
            if has_bias:
                bias = weights.take_rows([(f"{name}.{part}.bias", rows) for part, rows in parts.items()])
            return Linear(backend, weight, bias)

        def add_norm(gain: str) -> AddRmsNorm:
            return AddRmsNorm(backend, weights.take(gain, (hidden,)), spec.rms_norm_eps)

        qkv = {"self_attn.q_proj": spec.q_size, "self_attn.k_proj": spec.kv_size, "self_attn.v_proj": spec.kv_size}
        self.attention = PagedSelfAttention(
            backend,
            spec,
            linear(qkv, hidden, spec.attention_bias),
            linear({"self_attn.o_proj": hidden}, spec.q_size, spec.attention_bias),
            kv_cache,
        )
        self.mlp_norm = add_norm(f"{name}.post_attention_layernorm.weight")
        self.mlp = GatedMlp(
            backend,
            linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, spec.mlp_bias),
            linear({"mlp.down_proj": hidden}, inner, spec.mlp_bias),
        )
        self.next_norm = add_norm(next_gain)

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
    ) -> tuple[ms.Tensor, ms.Tensor]:
        attended = self.attention(normed, cos, sin, slot_mapping, block_tables, query_lens, context_lens)
        normed, hidden = self.mlp_norm(attended, hidden)
        normed, hidden = self.next_norm(self.mlp(normed), hidden)
        return normed, hidden
