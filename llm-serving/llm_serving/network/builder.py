"""The interface with which a model family describes its network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from llm_serving.errors import ModelError
from llm_serving.network.caches import CacheLayout, CacheShape, StateShape
from llm_serving.network.experts import MAX_EXPERTS, Expert, ExpertRouting, ExpertStacks, Gate, expert_weights
from llm_serving.network.operations import BY_TOKEN, ElementType, Operation, Transform, Value, Weight
from llm_serving.network.rope import Rotary
from llm_serving.network.weights import Constant, PaddedMeanScale, PositionEmbedding, order_of, shared_order


class Network:
    """A network under construction. Each method appends one operation and returns the value that it writes.
    `gamma_transform`: function of stored norm weights, in float32, that returns the weights to use, or None. `causal`:
    whether a token attends only to itself and earlier tokens. If not, one step computes a whole prompt.
    """

    def __init__(
        self,
        hidden: int,
        vocab: int,
        eps: float = 1e-6,
        gamma_transform: Transform | None = None,
        *,
        causal: bool = True,
    ) -> None:
        self.hidden = hidden
        self.vocab = vocab
        self.causal = causal
        self.positions: PositionEmbedding | None = None
        self.given: Value | None = None
        """Rows that each step provides instead of token ids. None means that the network looks up an embedding."""
        self.num_labels = 0
        """Number of scores that the head computes for a request. 0 means that it computes logits of tokens."""
        self.operations: list[Operation] = []
        self.caches: list[CacheShape] = []
        self.states: list[StateShape] = []
        """The states of operations. Their attribute `state` is an index into this list."""
        self.layout: CacheLayout | None = None
        self.num_adapter_slots = 0
        self.optional: set[str] = set()
        self.rotaries: set[Rotary] = set()
        self._num_experts = 0
        self._head_start: int | None = None
        self._eps = eps
        self._gamma_transform = gamma_transform

    @property
    def weights(self) -> list[Weight]:
        return list(dict.fromkeys(weight for each in self.operations for weight in each.weights.values()))

    @property
    def head(self) -> Operation:
        return self.operations[-1]

    @property
    def head_operations(self) -> list[Operation]:
        return self.operations[-1 if self._head_start is None else self._head_start :]

    @property
    def head_input(self) -> Value:
        return self.head_operations[0].inputs["x"]

    @property
    def num_caches(self) -> int:
        """Number of KV caches: one for each layer, unless layers in groups share them."""
        return len(self.caches) if self.layout is None else len(self.layout.shapes) + len(self.layout.views)

    @property
    def num_input_ids(self) -> int:
        """Number of input ids. With token types, an input id is `token + type * vocab`."""
        return self.vocab * (1 if self.positions is None else self.positions.num_types)

    def changed(self, **attributes: Any) -> Network:
        """Return a copy with other attributes, such as `operations`. It shares everything else with this network."""
        other = copy(self)
        vars(other).update(attributes)
        return other

    def hidden_states(self) -> list[Operation]:
        before = self.operations[: -len(self.head_operations)]
        return [*before, Operation("hidden_states", {"x": self.head_input}, {}, {}, {})]

    def allow_unused(self, *names: str) -> None:
        self.optional.update(names)

    def embedding(
        self, name: str, *, scale: float = 1.0, rounded_scale: bool = False, width: int = 0, stored_rows: int = 0
    ) -> Value:
        """Look up rows of the table [V, width] by token id.

        `scale`: factor of the rows. If `rounded_scale`, it is rounded to the model dtype. `width`: columns of the
        table, or 0 for the hidden size. `stored_rows`: rows in the checkpoint, or 0 for the vocabulary size. Token ids
        without a row in the checkpoint get row 0.
        """
        attributes = {**BY_TOKEN, "scale": scale, "rounded_scale": rounded_scale}
        width = width or self.hidden
        table = self._matrix(name, (self.vocab, width))
        if stored_rows not in (0, self.vocab):
            rows = shared_order(tuple(at if at < stored_rows else 0 for at in range(self.vocab)))
            table = replace(table, stored_shapes=((stored_rows, width),), rows=rows)
        return self.record("embedding", {}, {"table": table}, attributes, width)

    def given_rows(self, width: int) -> Value:
        self.given = Value("given", width)
        return self.given

    def linear(
        self,
        x: Value,
        names: str | Sequence[str],
        sizes: int | Sequence[int],
        *,
        bias: bool = False,
        rows: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
        heads: int = 1,
        transform: Transform | None = None,
        stored_shapes: tuple[int, int] | None = None,
        width: int | None = None,
    ) -> Value:
        """Compute x * weight^T plus an optional bias.

        Args:
            names: Prefixes of the tensors `<name>.weight` and `<name>.bias`, which are stacked.
            sizes: Number of rows of each tensor.
            rows, columns, transform: As in `Weight`. `rows` also selects the elements of the bias.
            heads: Number of equal parts of x and of the weight's rows. Each part of x is multiplied by its own part of
                the weight.
            stored_shapes: Shape of the only tensor, if it differs from the (size, columns) that the other arguments
                imply.
            width: Columns of the result, if `transform` changes the number of the weight's rows.
        """
        names = (names,) if isinstance(names, str) else tuple(names)
        sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        width = width or (sum(sizes) if rows is None else len(rows))
        num_columns = x.width // heads if columns is None else max(columns) + 1
        shapes = tuple((size, num_columns) for size in sizes) if stored_shapes is None else (stored_shapes,)
        weights = {
            "weight": Weight(
                tuple(f"{name}.weight" for name in names),
                (width, x.width // heads),
                shapes,
                order_of(rows, sum(sizes)),
                order_of(columns, num_columns),
                transform,
            )
        }
        if bias:
            biases = tuple(f"{name}.bias" for name in names)
            weights["bias"] = Weight(biases, (width,), tuple((size,) for size in sizes), order_of(rows, sum(sizes)))
        attributes = {"function": "", "scale": 1.0, "tiled": False, "heads": heads}
        return self.record("linear", {"x": x}, weights, attributes, width)

    def rms_norm(
        self,
        x: Value,
        names: str | Sequence[str] | None,
        *,
        group: int = 0,
        unpadded: int = 0,
        eps: float | None = None,
        rows: Sequence[int] | None = None,
        as_stored: bool = False,
        of_row: bool = False,
    ) -> Value:
        """Compute x / sqrt(mean(x^2) + eps) * gamma in float32.

        Args:
            names: Prefixes of the tensors `<name>.weight`, which are stacked to gamma. None means that gamma is 1.
            group: Number of columns that are normalised together. 0 means whole rows.
            unpadded: Number of columns of a group that are not zero padding. 0 means all columns.
            rows: Order of the elements of gamma (`Weight.rows`).
            as_stored: Whether the stored gamma is used without `gamma_transform`.
            of_row: Whether gamma has one element for each column of a row; otherwise one for each column of a group.
        """
        size = group or x.width
        unpadded = unpadded or size
        transform = None if as_stored else self._gamma_transform
        transform = transform if unpadded == size else PaddedMeanScale(unpadded / size, transform)
        dtype: ElementType = "model" if transform is None else "float32"
        count = x.width // size if of_row else 1
        shape, stored = (count * size,), (count * unpadded,)
        if names is None:
            gamma = Weight((), shape, generate=Constant(shape[0], math.sqrt(unpadded / size)), dtype="float32")
        else:
            names = (names,) if isinstance(names, str) else tuple(names)
            sizes = ((stored[0] // len(names),),) * len(names)
            tensors, order = tuple(f"{name}.weight" for name in names), order_of(rows, stored[0])
            gamma = Weight(tensors, shape, sizes, order, transform=transform, dtype=dtype)
        # Padding makes the mean smaller by the factor unpadded / size. eps is scaled by the same factor.
        attributes = {"eps": (self._eps if eps is None else eps) * unpadded / size, "group": group}
        return self.record("rms_norm", {"x": x}, {"gamma": gamma}, attributes | {"centred": False}, x.width)

    def layer_norm(
        self,
        x: Value,
        names: str | Sequence[str],
        *,
        bias: bool = False,
        group: int = 0,
        rows: Sequence[int] | None = None,
        stored_shape: tuple[int, ...] | None = None,
        eps: float | None = None,
    ) -> Value:
        """Compute (x - mean) / sqrt(variance + eps) * gamma + beta in float32. Arguments: see `rms_norm`, but each
        group has its own gamma and, with `bias`, its own beta. `stored_shape`: shape of a tensor that is no vector.
        """
        names = (names,) if isinstance(names, str) else tuple(names)
        shape = stored_shape or (x.width // len(names),)
        weights = {
            role: Weight(
                tuple(f"{name}.{kind}" for name in names),
                (x.width,),
                (shape,) * len(names),
                order_of(rows, x.width),
            )
            for role, kind in (("gamma", "weight"), ("beta", "bias"))[: 1 + bias]
        }
        attributes = {"eps": self._eps if eps is None else eps, "group": group, "centred": True}
        return self.record("rms_norm", {"x": x}, weights, attributes, x.width)

    def split(self, x: Value, *widths: int) -> list[Value]:
        """Return views of consecutive column ranges of x. This adds no operation."""
        starts = np.cumsum([0, *widths[:-1]]).tolist()
        return [
            Value(f"{x.name}[{at}:]", width, x.dtype, x.root, x.start + at)
            for width, at in zip(widths, starts, strict=True)
        ]

    def rope(self, x: Value, rotary: Rotary, offset: Weight | None = None) -> Value:
        """Apply a rotary embedding to each head of x. Subtract `offset`, float32 [width], from the result.

        Subtracting an offset from all keys shifts all scores of a query equally, so the softmax stays the same. The
        keys become smaller, so rounding changes them less. Only a program subtracts the offset; MindSpore graphs of
        Cells ignore it. The attention must have neither capped scores nor sinks.
        """
        self.rotaries.add(rotary)
        tables = {
            name: Weight((), (-1, rotary.head_dim), generate=getattr(rotary, name), dtype="model")
            for name in ("cos", "sin")
        }
        offsets = {} if offset is None else {"offset": offset}
        return self.record("rope", {"x": x}, tables | offsets, {}, x.width)

    def store_kv(self, k: Value, v: Value, kv_heads: int) -> int:
        """Add a layer with a KV cache, and write keys and values to it. Return the layer's index for `attention`. If
        the network is not causal, all layers share one cache, because no later step reads it.
        """
        shape = CacheShape(kv_heads, k.width // kv_heads, v.width // kv_heads)
        if self.causal or shape not in self.caches:
            self.caches.append(shape)
        layer = len(self.caches) - 1
        self.operations.append(Operation("store_kv", {"k": k, "v": v}, {}, {}, {"layer": layer}))
        return layer

    def attention(
        self,
        q: Value,
        layer: int,
        *,
        scale: float,
        window: int | None = None,
        cap: float | None = None,
        slopes: Weight | None = None,
        sinks: Weight | None = None,
        q_rope: Value | None = None,
        chunk: int = 0,
        selected: Value | None = None,
    ) -> Value:
        """Compute attention over the cache of a layer: causal if the network is causal, else bidirectional.

        Args:
            q: Queries; equal groups of query heads share one KV head.
            layer: Result of `store_kv`.
            window: Number of tokens that a row attends to, including itself. If the network is not causal, a row
                attends to tokens less than `window` positions away on either side.
            cap: Scores s become cap * tanh(s / cap).
            chunk: A row attends only to tokens of its own chunk of `chunk` positions (Llama 4). 0 means no chunks. A
                layer cannot have both chunks and a window.
            slopes: ALiBi slope of each head (Press et al. 2021), subtracted from a score for each token of distance.
            sinks: An additional score for each head, which takes part in the softmax and adds no value (gpt-oss).
            q_rope: Rotary part of the queries of multi-head latent attention (DeepSeek-V2). The cached k is then the
                latent vector, which is both key and value, and the cached v is the rotary part of the key.
            selected: Result of `select_keys`. A row attends only to these keys. Requires `q_rope`.
        """
        attributes = {"layer": layer, "scale": scale, "window": window or 0, "cap": cap or 0.0, "eps": 0.0}
        attributes |= {"causal": self.causal, "chunk": chunk}
        return self.record(
            "attention",
            {"q": q, "q_rope": q_rope, "selected": selected},
            {"slopes": slopes, "sinks": sinks},
            attributes,
            q.width,
        )

    def select_keys(self, q: Value, weights: Value, layer: int, top_k: int) -> Value:
        """Return, for each row, the ascending positions of the `top_k` keys with the largest scores: int32 [T, top_k].

        The score of a key is the sum over heads of weight * relu(q * key) (DeepSeek-V3.2, 2025, section 2.1). Of equal
        scores, that of the earlier key counts as larger. A row selects only keys up to its own position. A row with
        fewer than `top_k` such keys ends with entries of -1. `q`: queries [T, heads * key width]. `weights`: [T,
        heads]. `layer`: result of `store_kv` for a layer with one KV head, which holds the keys.
        """
        selected = Value(f"selected{len(self.operations)}", top_k, "int32")
        attributes = {"layer": layer, "top_k": top_k}
        operation = Operation("select_keys", {"q": q, "weights": weights}, {}, {"selected": selected}, attributes)
        self.operations.append(operation)
        return selected

    def activation(self, x: Value, function: Literal["silu", "gelu_tanh", "gelu", "tanh"]) -> Value:
        return self.record("activation", {"x": x}, {}, {"function": function}, x.width)

    def gated_activation(self, x: Value, function: Gate) -> Value:
        return self.record("gated_activation", {"x": x}, {}, {"function": function}, x.width // 2)

    def add(self, a: Value, b: Value, scale: float = 1.0) -> Value:
        return self.record("add", {"a": a, "b": b}, {}, {"scale": scale}, a.width)

    def multiply(self, a: Value, b: Value, function: Literal["", "silu", "sigmoid", "relu"] = "") -> Value:
        return self.record("multiply", {"a": a, "b": b}, {}, {"function": function}, a.width)

    def scaled(self, x: Value, weight: Weight) -> Value:
        return self.record("multiply", {"a": x}, {"gamma": weight}, {"function": ""}, x.width)

    def sigmoid_gate(self, x: Value, gate: Value) -> Value:
        return self.record("sigmoid_gate", {"x": x, "gate": gate}, {}, {}, x.width)

    def experts(
        self,
        x: Value,
        router: str,
        routing: ExpertRouting,
        experts: Sequence[Expert] | ExpertStacks,
        inner: int,
        *,
        routed: Value | None = None,
    ) -> Value:
        """Compute the sum of topk_weight * down(function(gate) * up) over a row's experts, in order of their numbers.
        `router`: prefix of the tensor `<router>.weight`, [number of experts, H]. `inner`: intermediate size of an
        expert. `routed`: input of the router, by default x.
        """
        routed = x if routed is None else routed
        count, top_k = experts.count if isinstance(experts, ExpertStacks) else len(experts), routing.top_k
        self._num_experts += count
        if self._num_experts > MAX_EXPERTS:
            raise ModelError(f"a model may have at most {MAX_EXPERTS} experts in all layers together")
        chosen = {"weight": self._matrix(router, (count, routed.width))}
        if routing.correction is not None:
            stored = (routing.correction_rows, count) if routing.correction_rows else (count,)
            chosen["correction"] = Weight((routing.correction,), (count,), (stored,), dtype="float32")
        if routing.factors is not None:
            chosen["factors"] = Weight((routing.factors,), (count,), ((count,),), dtype="float32")
        attributes = {
            **{name: getattr(routing, name) for name in ("top_k", "score", "scale", "groups", "top_groups", "margin")},
            "normalise": routing.normalise,
        }
        number = len(self.operations)
        outputs = {
            "topk_weights": Value(f"shares{number}", top_k, "float32"),
            "topk_ids": Value(f"chosen{number}", top_k, "int32"),
        }
        self.operations.append(Operation("route", {"x": routed}, chosen, outputs, attributes))
        gated = routing.function != "relu2"
        weights = expert_weights(experts, x.width, inner, bias=routing.bias, gated=gated)
        if routing.bias:
            chosen["bias"] = Weight((f"{router}.bias",), (count,), ((count,),), dtype="float32")
        attributes = {"function": routing.function, "scale": 1.0, "experts": count}
        attributes["scales_input"] = routing.scales_input
        return self.record("experts", {"x": x, **outputs}, weights, attributes, x.width)

    def lm_head(
        self,
        x: Value,
        name: str,
        *,
        scale: float = 1.0,
        cap: float | None = None,
        transform: Transform | None = None,
        bias: bool = False,
    ) -> None:
        """Compute scale * (x * head^T + bias), then cap * tanh(logits / cap), as the last operation of the network."""
        weights = {"weight": self._matrix(name, (self.vocab, self.hidden), transform)}
        if bias:
            weights["bias"] = Weight((f"{name}.bias",), (self.vocab,), ((self.vocab,),), dtype="float32")
        attributes = {"scale": scale, "cap": cap or 0.0, "tiled": False, "first": 0, "rows": 0}
        self.operations.append(Operation("lm_head", {"x": x}, weights, {}, attributes))

    def begin_head(self) -> None:
        """Begin the operations that compute the scores of a request from its pooled vector."""
        self._head_start = len(self.operations)

    def scores(self, x: Value, num_labels: int) -> None:
        """Make x, in float32, the output of the network: `num_labels` scores of each request."""
        self.num_labels = num_labels
        self.result(x)

    def result(self, x: Value) -> None:
        """Make x, in float32, the result of a network without LM head."""
        self.operations.append(Operation("hidden_states", {"x": x}, {}, {}, {}))

    def _matrix(self, name: str, shape: tuple[int, int], transform: Transform | None = None) -> Weight:
        return Weight((f"{name}.weight",), shape, (shape,), transform=transform)

    def record(
        self,
        kind: str,
        inputs: Mapping[str, Value | None],
        weights: Mapping[str, Weight | None],
        attributes: Mapping[str, Any],
        width: int | None = None,
    ) -> Value:
        """Append an operation with one result of `width` columns, by default the hidden size."""
        y = Value(f"{kind}{len(self.operations)}", self.hidden if width is None else width)
        present = {role: each for role, each in inputs.items() if each is not None}
        of_weights = {role: each for role, each in weights.items() if each is not None}
        self.operations.append(Operation(kind, present, of_weights, {"y": y}, attributes))
        return y
