"""The layers of the Llama family: made of the operations of a backend, or all as one where it has that."""

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
from llm_serving.layers.selection import EveryRow, SampledRows
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

    (hidden [T, H], cos, sin, slot_mapping, block_tables, query_lens, context_lens, sample_indices int32[S])
    -> normed [S, H] of the rows that sample

    Of a row that does not, only keys and values are ever read again: the last layer leaves it out behind attention.
    """
    names = [f"model.layers.{index}" for index in range(spec.num_hidden_layers)]
    gains = [
        weights.take(name, (spec.hidden_size,))
        for name in (*(f"{name}.input_layernorm.weight" for name in names), "model.norm.weight")
    ]
    # Taken one after the other: a stacked weight takes memory until it is packed.
    layers = (_read_layer(spec, weights, name) for name in names)
    scale, eps = spec.head_dim**-0.5, spec.rms_norm_eps
    biases = {"attention_bias": spec.attention_bias, "mlp_bias": spec.mlp_bias}
    together = backend.decoder_layers(len(names), scale, eps, **biases)
    if together is not None:
        return LayersTogether(backend, together, gains, layers, kv_caches, eps)
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


class LayersTogether(nn.Cell):
    """Layers as one operation.

    Args:
        backend: Makes Parameters.
        operation: From `Backend.decoder_layers`.
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
        parameters: list[ms.Parameter] = []
        for index, (gain, weights, kv_cache) in enumerate(zip(gains[:-1], layers, kv_caches, strict=True)):
            parameters += [*_as_parameters(backend, f"layers.{index}", gain, weights), *kv_cache]
        self.parameters = ms.ParameterTuple(parameters)
        self.operation = operation
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
        sample_indices: ms.Tensor,
    ) -> ms.Tensor:
        step = slot_mapping, block_tables, query_lens, context_lens, sample_indices
        return self.norm(self.operation(hidden, cos, sin, *step, *self.parameters))


def _as_parameters(backend: Backend, name: str, gain: Array, weights: LayerWeights) -> list[ms.Parameter]:
    """What `Backend.decoder_layers` takes of a layer before its caches."""
    projections = {field: getattr(weights, field) for field in ("qkv", "out", "gate_up", "down")}
    biases = [projection.bias for projection in projections.values() if projection.bias is not None]
    return [
        backend.vector(gain, weights.mlp_gain, *biases, name=f"{name}.vectors"),
        *(backend.linear_weight(each.weight, f"{name}.{field}") for field, each in projections.items()),
    ]


class LayersOfOperations(nn.Cell):
    """Layers made of operations; arguments as those of `LayersTogether`.

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
        selections = [EveryRow()] * (spec.num_hidden_layers - 1) + [SampledRows(backend)]
        parts = zip(layers, gains[1:], kv_caches, selections, strict=True)
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
        sample_indices: ms.Tensor,
    ) -> ms.Tensor:
        step = slot_mapping, block_tables, query_lens, context_lens, sample_indices
        normed = self.norm(hidden)
        for layer in self.layers:
            normed, hidden = layer(normed, hidden, cos, sin, *step)
        return normed


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
