"""The layers of the Llama family: made of the operations of a backend, or each as one operation where it has that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mindspore as ms
from mindspore import nn

from llm_serving.backends.ascend import AscendBackend
from llm_serving.backends.base import Array, Backend
from llm_serving.core.model_spec import ModelSpec
from llm_serving.layers.attention import PagedSelfAttention, head_sizes
from llm_serving.layers.linear import Linear
from llm_serving.layers.mlp import GatedMlp
from llm_serving.layers.norm import AddRmsNorm, RmsNorm
from llm_serving.models.base import KVCaches
from llm_serving.models.weights import WeightReader


@dataclass(frozen=True)
class Projection:
    """A weight [N, K], several of one input stacked, and its bias [N] where the model has one."""

    weight: Array
    bias: Array | None


@dataclass(frozen=True)
class LayerWeights:
    """What a layer reads from a model folder, the gain of its first norm aside."""

    qkv: Projection
    out: Projection
    mlp_gain: Array
    gate_up: Projection
    down: Projection


def llama_layers(spec: ModelSpec, backend: Backend, weights: WeightReader, kv_caches: KVCaches) -> nn.Cell:
    """All layers and the norm after them.

    (hidden [T, H], cos, sin, slot_mapping, block_tables, query_lens, context_lens) -> normed [T, H]
    """
    names = [f"model.layers.{index}" for index in range(spec.num_hidden_layers)]
    gains = [
        weights.take(name, (spec.hidden_size,))
        for name in (*(f"{name}.input_layernorm.weight" for name in names), "model.norm.weight")
    ]
    # Taken one after the other: a stacked weight takes memory until it is packed.
    layers = (_read_layer(spec, weights, name) for name in names)
    scale, eps = spec.head_dim**-0.5, spec.rms_norm_eps
    whole = backend.decoder_layer(scale, eps, attention_bias=spec.attention_bias, mlp_bias=spec.mlp_bias)
    if whole is not None:
        return WholeLayers(backend, whole, gains, layers, kv_caches, eps)
    return LayersOfOperations(spec, backend, gains, layers, kv_caches)


def _read_layer(spec: ModelSpec, weights: WeightReader, name: str) -> LayerWeights:
    hidden, inner = spec.hidden_size, spec.intermediate_size

    def projection(parts: dict[str, int], num_inputs: int, has_bias: bool) -> Projection:
        weight = weights.take_rows([(f"{name}.{part}.weight", rows) for part, rows in parts.items()], num_inputs)
        if not has_bias:
            return Projection(weight, None)
        return Projection(weight, weights.take_rows([(f"{name}.{part}.bias", rows) for part, rows in parts.items()]))

    qkv = {"self_attn.q_proj": spec.q_size, "self_attn.k_proj": spec.kv_size, "self_attn.v_proj": spec.kv_size}
    return LayerWeights(
        projection(qkv, hidden, spec.attention_bias),
        projection({"self_attn.o_proj": hidden}, spec.q_size, spec.attention_bias),
        weights.take(f"{name}.post_attention_layernorm.weight", (hidden,)),
        projection({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, spec.mlp_bias),
        projection({"mlp.down_proj": hidden}, inner, spec.mlp_bias),
    )


class WholeLayers(nn.Cell):
    """Layers as one operation each.

    Args:
        backend: Makes Parameters.
        operation: From `Backend.decoder_layer`.
        gains: Of the first norm of each layer, and of the norm after the last.
        layers: The other weights of each layer.
        kv_caches: One pair for each layer.
        eps: Of the norms.
    """

    def __init__(
        self,
        backend: Backend,
        operation: nn.Cell,
        gains: Sequence[Array],
        layers: Iterator[LayerWeights],
        kv_caches: KVCaches,
        eps: float,
    ) -> None:
        super().__init__()
        parts = zip(gains[:-1], layers, kv_caches, strict=True)
        self.layers = nn.CellList([WholeLayer(backend, operation, *part) for part in parts])
        self.norm = RmsNorm(backend, gains[-1], eps)

    def construct(
        self,
        hidden: ms.Tensor,
        cos: ms.Tensor,
        sin: ms.Tensor,
        slot_mapping: ms.Tensor,
        block_tables: ms.Tensor,
        query_lens: ms.Tensor,
        context_lens: ms.Tensor,
    ) -> ms.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, slot_mapping, block_tables, query_lens, context_lens)
        return self.norm(hidden)


class WholeLayer(nn.Cell):
    """hidden [T, H] -> hidden [T, H]"""

    def __init__(
        self,
        backend: Backend,
        operation: nn.Cell,
        gain: Array,
        weights: LayerWeights,
        kv_cache: tuple[ms.Parameter, ms.Parameter],
    ) -> None:
        super().__init__()
        projections = weights.qkv, weights.out, weights.gate_up, weights.down
        biases = [projection.bias for projection in projections if projection.bias is not None]
        self.vectors = backend.vector(gain, weights.mlp_gain, *biases)
        self.qkv, self.out, self.gate_up, self.down = (backend.linear_weight(each.weight) for each in projections)
        self.key_cache, self.value_cache = kv_cache
        self.operation = operation

    def construct(
        self,
        hidden: ms.Tensor,
        cos: ms.Tensor,
        sin: ms.Tensor,
        slot_mapping: ms.Tensor,
        block_tables: ms.Tensor,
        query_lens: ms.Tensor,
        context_lens: ms.Tensor,
    ) -> ms.Tensor:
        weights = self.vectors, self.qkv, self.out, self.gate_up, self.down
        step = slot_mapping, block_tables, query_lens, context_lens
        return self.operation(hidden, *weights, cos, sin, self.key_cache, self.value_cache, *step)


class LayersOfOperations(nn.Cell):
    """Layers made of operations; arguments as those of `WholeLayers`.

    A residual and the norm after it are one operation, so each layer also owns the norm that follows it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        backend: Backend,
        gains: Sequence[Array],
        layers: Iterator[LayerWeights],
        kv_caches: KVCaches,
    ) -> None:
        super().__init__()
        self.head_sizes = head_sizes(spec)
        self.norm = RmsNorm(backend, gains[0], spec.rms_norm_eps)
        parts = zip(layers, gains[1:], kv_caches, strict=True)
        self.layers = nn.CellList([LlamaLayer(spec, backend, *part) for part in parts])

    def use_whole_prompts(self, backend: AscendBackend) -> None:
        """`LlamaForCausalLM.use_whole_prompts`."""
        for layer in self.layers:
            layer.attention.attention = backend.prompt_attention(*self.head_sizes)

    def construct(
        self,
        hidden: ms.Tensor,
        cos: ms.Tensor,
        sin: ms.Tensor,
        slot_mapping: ms.Tensor,
        block_tables: ms.Tensor,
        query_lens: ms.Tensor,
        context_lens: ms.Tensor,
    ) -> ms.Tensor:
        normed = self.norm(hidden)
        for layer in self.layers:
            normed, hidden = layer(normed, hidden, cos, sin, slot_mapping, block_tables, query_lens, context_lens)
        return normed


class LlamaLayer(nn.Cell):
    """(normed [T, H], hidden [T, H]) -> the same for the next layer: attention, then feed-forward.

    Args:
        spec: The model.
        backend: Makes operations and Parameters.
        weights: Those of the layer.
        next_gain: Gain of the norm that follows this layer.
        kv_cache: Key and value cache of this layer.
    """

    def __init__(
        self,
        spec: ModelSpec,
        backend: Backend,
        weights: LayerWeights,
        next_gain: Array,
        kv_cache: tuple[ms.Parameter, ms.Parameter],
    ) -> None:
        super().__init__()

        def linear(projection: Projection) -> Linear:
            return Linear(backend, projection.weight, projection.bias)

        self.attention = PagedSelfAttention(backend, spec, linear(weights.qkv), linear(weights.out), kv_cache)
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
    ) -> tuple[ms.Tensor, ms.Tensor]:
        attended = self.attention(normed, cos, sin, slot_mapping, block_tables, query_lens, context_lens)
        normed, hidden = self.mlp_norm(attended, hidden)
        normed, hidden = self.next_norm(self.mlp(normed), hidden)
        return normed, hidden
