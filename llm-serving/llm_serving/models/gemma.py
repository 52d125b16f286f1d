"""Gemma: folders store norm weights minus 1, and the embedding is scaled.

Gemma 2 and 3 have norms before and after both sublayers, and alternating sliding windows. Gemma 2 caps attention scores
and logits. Gemma 3 has norms of heads and two rotary embeddings.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from llm_serving.models.attention import HEAD_NORMS, attention_heads, rotary_embedding
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import (
    FULL,
    SLIDING,
    SUBLAYER_NORMS,
    Layer,
    attend,
    block_decoder,
    empty_network,
    gated,
    layer_kinds,
    layer_windows,
)
from llm_serving.network.builder import Network
from llm_serving.network.operations import Float32Array
from llm_serving.network.rope import Rotary


def gemma(c: ConfigReader) -> Network:
    net, heads = empty_network(c, plus_one), attention_heads(c)
    bias = c.boolean("attention_bias")
    # Folders of the first release name the exact GELU, although the model uses the tanh approximation.
    c.choice("hidden_act", ("gelu_pytorch_tanh", "gelu"), "gelu_pytorch_tanh")

    attention = attend(net, heads, rotary_embedding(c, heads), bias=bias, out_bias=bias)
    return _with_scaled_embedding(net, c, attention)


def gemma2(c: ConfigReader) -> Network:
    rotary = rotary_embedding(c, attention_heads(c))
    return _gemma(c, every=2, rotaries={FULL: rotary, SLIDING: rotary}, caps=(50.0, 30.0))


def gemma3(c: ConfigReader) -> Network:
    heads = attention_heads(c)
    full, sliding = rotary_embedding(c, heads, kind=FULL, theta=1e6), rotary_embedding(c, heads, kind=SLIDING)
    if not c.has("rope_parameters"):
        sliding = replace(sliding, theta=c.number("rope_local_base_freq", 10000.0), scaling=None)
    every = c.integer("sliding_window_pattern", 6)
    return _gemma(c, every=every, rotaries={FULL: full, SLIDING: sliding}, norms=HEAD_NORMS)


def _gemma(
    c: ConfigReader,
    *,
    every: int,
    rotaries: dict[str, Rotary],
    norms: tuple[str, str] | None = None,
    caps: tuple[float | None, float | None] = (None, None),
) -> Network:
    net, heads = empty_network(c, plus_one), attention_heads(c)
    kinds = layer_kinds(c, every)
    scale = c.number("query_pre_attn_scalar", 256.0) ** -0.5
    cap, last_cap = (
        c.number(key) if c.has(key) else usual if c.is_absent(key) else None
        for key, usual in zip(("attn_logit_softcapping", "final_logit_softcapping"), caps, strict=True)
    )
    bias = c.boolean("attention_bias")
    c.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")

    rotary, window = [rotaries[kind] for kind in kinds], layer_windows(c, kinds, 4096)
    attention = attend(net, heads, rotary, norms=norms, bias=bias, out_bias=bias, scale=scale, window=window, cap=cap)
    before, after = ("input_layernorm", "pre_feedforward_layernorm"), SUBLAYER_NORMS
    return _with_scaled_embedding(net, c, attention, before=before, after=after, cap=last_cap)


def _with_scaled_embedding(net: Network, c: ConfigReader, attention: Layer, **options: Any) -> Network:
    options |= {"tied": True, "table_scale": net.hidden**0.5, "rounded_scale": True}
    return block_decoder(net, c, attention, gated(net, c, "gelu_tanh"), **options)


def plus_one(gamma: Float32Array) -> Float32Array:
    return gamma + np.float32(1)
