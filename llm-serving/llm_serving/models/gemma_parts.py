"""Parts that Gemma 3n and 4 share: per-layer embeddings, keys and values of earlier layers, multimodal tensor names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llm_serving.models.attention import HEAD_NORMS, QKV, Heads, output_columns, qkv_rows
from llm_serving.models.config_reader import TEXT_CONFIG, ConfigReader
from llm_serving.models.layers import SLIDING, Layer, Norm, decoder
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value
from llm_serving.network.rope import Rotary
from llm_serving.network.weights import Scaled

GELU = "gelu_pytorch_tanh"
IMAGES = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
"""Prefixes, after `model.`, of tensors for images and audio, which a text model does not read."""


class LayerInputs:
    """Per-layer embeddings: a layer also reads its own embedding of the token plus a projection of the main one."""

    def __init__(self, net: Network, c: ConfigReader, layers: int) -> None:
        self._net, self._layers, self._prefix = net, layers, text_prefix(c)
        self._width = c.integer("hidden_size_per_layer_input", 256)
        self.stored_rows = c.integer("vocab_size_per_layer_input", 262144)
        self._eps = c.number("rms_norm_eps", 1e-6)
        self._inputs: list[Value] = []

    def embed(self, hidden: Value) -> None:
        """Compute the inputs of all layers, [T, width] each. `hidden` is the token embedding [T, hidden size]."""
        net, whole, at = self._net, self._width * self._layers, self._prefix
        projected = net.linear(hidden, at + "per_layer_model_projection", whole)
        # The model divides the projection by the root of the hidden size. Scaling the norm's eps has the same effect.
        name, eps = at + "per_layer_projection_norm", self._eps * net.hidden
        projected = net.rms_norm(projected, name, group=self._width, eps=eps)
        name, scale = at + "embed_tokens_per_layer", self._width**0.5
        rows = net.embedding(name, scale=scale, rounded_scale=True, width=whole, stored_rows=self.stored_rows)
        self._inputs = net.split(net.add(projected, rows), *[self._width] * self._layers)

    def apply(self, x: Value, index: int, at: str) -> Value:
        """Return what layer `index` adds to `x` for its own input. `at`: tensor name prefix of the layer."""
        net = self._net
        gate = net.activation(net.linear(x, at + "per_layer_input_gate", self._width), "gelu_tanh")
        half = Scaled(0.5**0.5)  # scales the sum of both parts of the layer's input
        gated = net.multiply(self._inputs[index], gate)
        x = net.linear(gated, at + "per_layer_projection", net.hidden, transform=half)
        return net.rms_norm(x, at + "post_per_layer_input_norm")


def text_prefix(c: ConfigReader) -> str:
    return "model.language_model." if c.has(TEXT_CONFIG) else "model."


def text_decoder(
    net: Network,
    c: ConfigReader,
    layer: Layer,
    *,
    cap: float | None,
    normalize: Norm | None = None,
) -> Network:
    prefix = text_prefix(c)
    if c.has(TEXT_CONFIG):
        net.allow_unused(*(f"model.{name}" for name in IMAGES))
    return decoder(
        net,
        c,
        layer,
        table=prefix + "embed_tokens",
        layers=prefix + "layers",
        norm=prefix + "norm",
        tied=True,
        table_scale=net.hidden**0.5,
        rounded_scale=True,
        cap=cap,
        normalize=normalize,
    )


class SharingAttention:
    """Attention with norms of queries, keys and values, and with unscaled scores. Call it for each layer, in order.

    The last `num_kv_shared_layers` layers read the keys and values of an earlier layer of the same kind. `sources`: for
    each layer, the index of that earlier layer, or None if it has its own. `heads`, `rotaries`: by kind of layer.
    """

    def __init__(
        self,
        net: Network,
        c: ConfigReader,
        kinds: Sequence[str],
        heads: Mapping[str, Heads],
        rotaries: Mapping[str, Rotary],
        num_shared: int,
    ) -> None:
        self._net, self._kinds, self._heads, self._rotaries = net, kinds, heads, rotaries
        self._window, self._bias = c.integer("sliding_window", 512), c.boolean("attention_bias")
        self._numbers: list[int] = []
        """For each layer, the index of the KV cache that it reads."""
        first = len(kinds) - c.integer("num_kv_shared_layers", num_shared, least=0)
        own = {kind: index for index, kind in enumerate(kinds[: max(first, 0)])}
        if missing := set(kinds) - own.keys():
            raise c.fail(
                "num_kv_shared_layers",
                f"must be so small that a layer with {' and '.join(sorted(missing))} has its own keys",
            )
        self.sources = [None if index < first else own[kind] for index, kind in enumerate(kinds)]

    def __call__(self, x: Value, index: int, at: str, *, keys_are_values: bool = False) -> Value:
        """Add the attention of a layer. `keys_are_values`: whether the values are the keys before norm and rotation,
        instead of a projection of their own.
        """
        net, kind, bias, source = self._net, self._kinds[index], self._bias, self.sources[index]
        heads, rotary = self._heads[kind], self._rotaries[kind]
        rows, order, q_rows = qkv_rows(heads, rotary, False), rotary.order(), heads.q * heads.own
        kv_rows = heads.kv * heads.own
        names, value_order = [at + name for name in QKV], None
        if source is not None:
            q = net.linear(x, names[0], q_rows, bias=bias, rows=rows[: heads.q_width])
            net.allow_unused(*(f"{at}self_attn.{name}" for name in ("k_proj.", "v_proj.", "k_norm.")))
        elif keys_are_values:
            both = net.linear(x, names[:2], (q_rows, kv_rows), bias=bias, rows=rows[: heads.q_width + heads.kv_width])
            q, k = net.split(both, heads.q_width, heads.kv_width)
            v, value_order = k, order
        else:
            whole = net.linear(x, names, (q_rows, kv_rows, kv_rows), bias=bias, rows=rows)
            q, k, v = net.split(whole, heads.q_width, heads.kv_width, heads.kv_width)

        def normalized(part: Value, name: str | None) -> Value:
            rows = None if name is None else order
            return net.rms_norm(part, name, group=heads.dim, unpadded=heads.own, rows=rows)

        q = net.rope(normalized(q, at + HEAD_NORMS[0]), rotary)
        if source is None:
            k = net.rope(normalized(k, at + HEAD_NORMS[1]), rotary)
            self._numbers.append(net.store_kv(k, normalized(v, None), heads.kv))
        else:
            self._numbers.append(self._numbers[source])
        window = self._window if kind == SLIDING else None
        attended = net.attention(q, self._numbers[index], scale=1.0, window=window)
        columns = output_columns(heads, value_order)
        return net.linear(attended, at + "self_attn.o_proj", net.hidden, bias=bias, columns=columns)
