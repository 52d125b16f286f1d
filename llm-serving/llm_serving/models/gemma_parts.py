"""Parts that Gemma 3n and 4 share: per-layer embeddings, keys and values of earlier layers, multimodal tensor names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llm_serving.models.attention import HEAD_NORMS, QKV, Heads, output_columns, qkv_rows
from llm_serving.models.config_reader import TEXT_CONFIG, ConfigReader
from llm_serving.models.layers import Layer, Norm, decoder
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value
from llm_serving.network.rope import Rotary
from llm_serving.network.weights import Scaled

GELU = "gelu_pytorch_tanh"
IMAGES = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
"""Prefixes, after `model.`, of tensors for images and audio, which a text model does not read."""


@dataclass(frozen=True)
class LayerInputs:
    """Per-layer embeddings: a layer also reads its own embedding of the token plus a projection of the main one."""

    prefix: str
    width: int
    layers: int
    stored_rows: int
    eps: float

    @classmethod
    def of(cls, c: ConfigReader, prefix: str, layers: int) -> LayerInputs:
        width, rows = c.integer("hidden_size_per_layer_input", 256), c.integer("vocab_size_per_layer_input", 262144)
        return cls(prefix, width, layers, rows, c.number("rms_norm_eps", 1e-6))

    def embed(self, net: Network, hidden: Value) -> list[Value]:
        """Return the per-layer inputs, [T, width] for each layer. `hidden` is the token embedding [T, hidden size]."""
        whole, at = self.width * self.layers, self.prefix
        projected = net.linear(hidden, at + "per_layer_model_projection", whole)
        # The model divides the projection by the root of the hidden size. Scaling the norm's eps has the same effect.
        name, eps = at + "per_layer_projection_norm", self.eps * net.hidden
        projected = net.rms_norm(projected, name, group=self.width, eps=eps)
        name, scale = at + "embed_tokens_per_layer", self.width**0.5
        rows = net.embedding(name, scale=scale, rounded_scale=True, width=whole, stored_rows=self.stored_rows)
        return net.split(net.add(projected, rows), *[self.width] * self.layers)

    def apply(self, net: Network, x: Value, given: Value, at: str) -> Value:
        """Return what a layer adds to `x` for its per-layer input `given`. `at`: tensor name prefix of the layer."""
        gate = net.activation(net.linear(x, at + "per_layer_input_gate", self.width), "gelu_tanh")
        half = Scaled(0.5**0.5)  # scales `given`
        x = net.linear(net.multiply(given, gate), at + "per_layer_projection", net.hidden, transform=half)
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
        for name in IMAGES:
            net.allow_unused(f"model.{name}")
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


def shared_layers(c: ConfigReader, kinds: Sequence[str], default: int) -> list[int | None]:
    """Return for each layer the earlier layer whose keys and values it reads, or None for a layer with its own."""
    count = c.integer("num_kv_shared_layers", default, least=0)
    first = len(kinds) - count
    own = {kind: index for index, kind in enumerate(kinds[: max(first, 0)])}
    if missing := set(kinds) - own.keys():
        raise c.fail(
            "num_kv_shared_layers",
            f"must be so small that a layer with {' and '.join(sorted(missing))} has its own keys",
        )
    return [None if index < first else own[kind] for index, kind in enumerate(kinds)]


def attention(
    net: Network,
    x: Value,
    at: str,
    heads: Heads,
    rotary: Rotary,
    *,
    layer: int | None,
    window: int | None,
    bias: bool,
    keys_are_values: bool = False,
) -> tuple[Value, int]:
    """Add attention with norms of queries, keys and values, and with unscaled scores. Return the result and the index
    of the layer in the KV cache that attention reads.

    `layer`: layer of the KV cache that an earlier layer writes and this one reads. None adds a layer to the KV cache.
    `keys_are_values`: whether the values are the keys before norm and rotation, instead of a projection of their own.
    """
    rows, order, q_rows = qkv_rows(heads, rotary, False), rotary.order(), heads.q * heads.own
    kv_rows = heads.kv * heads.own
    names, value_order = [at + name for name in QKV], None
    if layer is not None:
        q = net.linear(x, names[0], q_rows, bias=bias, rows=rows[: heads.q_width])
        for name in ("k_proj.", "v_proj.", "k_norm."):
            net.allow_unused(f"{at}self_attn.{name}")
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
    if layer is None:
        k = net.rope(normalized(k, at + HEAD_NORMS[1]), rotary)
        layer = net.store_kv(k, normalized(v, None), heads.kv)
    attended = net.attention(q, layer, scale=1.0, window=window)
    columns = output_columns(heads, value_order)
    return net.linear(attended, at + "self_attn.o_proj", net.hidden, bias=bias, columns=columns), layer
