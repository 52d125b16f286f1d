"""What a model folder holds of a Llama."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mindspore as ms

from llm_serving.backends.base import Array, Backend
from llm_serving.core.model_spec import ModelSpec
from llm_serving.models.weights import WeightReader


@dataclass(frozen=True)
class Projection:
    """A weight [N, K], several of one input stacked, and its bias [N] where the model has one."""

    weight: Array
    bias: Array | None


@dataclass(frozen=True)
class LayerWeights:
    """Of one layer, the gain of its first norm aside."""

    qkv: Projection
    out: Projection
    mlp_gain: Array
    gate_up: Projection
    down: Projection


class LlamaWeights:
    """Reads a folder once, in the order of its files: table, layers, head.

    Args:
        spec: The model.
        backend: Makes Parameters.
        reader: Of the folder.

    Attributes:
        table: [V, H]
        gains: [H] each, of the first norm of each layer and of the norm after the last.
    """

    def __init__(self, spec: ModelSpec, backend: Backend, reader: WeightReader) -> None:
        self._spec = spec
        self._backend = backend
        self._reader = reader
        self._layer_names = [f"model.layers.{index}" for index in range(spec.num_hidden_layers)]
        embed_tokens = reader.take("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
        # A tied table is a factor of the last product as well; look-ups accept that order of elements.
        store = backend.linear_weight if spec.tie_word_embeddings else backend.table
        self.table = store(embed_tokens, "table")
        norms = [*(f"{name}.input_layernorm" for name in self._layer_names), "model.norm"]
        self.gains = [reader.take(f"{norm}.weight", (spec.hidden_size,)) for norm in norms]

    def layers(self) -> Iterator[LayerWeights]:
        """One after the other: a stacked weight takes memory until it is packed."""
        return (self._layer(name) for name in self._layer_names)

    def head(self) -> ms.Parameter:
        """[V, H]; to be called after `layers`.

        Raises:
            ModelError: The folder has more than the model.
        """
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        head = self.table
        if not self._spec.tie_word_embeddings:
            head = self._backend.linear_weight(self._reader.take("lm_head.weight", shape), "head")
        elif "lm_head.weight" in self._reader:  # some exporters write the table twice
            self._reader.take("lm_head.weight", shape)
        self._reader.check_all_taken()
        return head

    def _layer(self, name: str) -> LayerWeights:
        spec, reader = self._spec, self._reader
        hidden, inner = spec.hidden_size, spec.intermediate_size

        def projection(parts: dict[str, int], num_inputs: int, has_bias: bool) -> Projection:
            weight = reader.take_rows([(f"{name}.{part}.weight", rows) for part, rows in parts.items()], num_inputs)
            if not has_bias:
                return Projection(weight, None)
            return Projection(weight, reader.take_rows([(f"{name}.{part}.bias", rows) for part, rows in parts.items()]))

        qkv = {"self_attn.q_proj": spec.q_size, "self_attn.k_proj": spec.kv_size, "self_attn.v_proj": spec.kv_size}
        return LayerWeights(
            projection(qkv, hidden, spec.attention_bias),
            projection({"self_attn.o_proj": hidden}, spec.q_size, spec.attention_bias),
            reader.take(f"{name}.post_attention_layernorm.weight", (hidden,)),
            projection({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, spec.mlp_bias),
            projection({"mlp.down_proj": hidden}, inner, spec.mlp_bias),
        )
