"""Gemma 2 and 3: norms on both sides of each half, whose gains are stored less one; layers that see a window alternate
with such that see all. Gemma 2 caps scores and logits; Gemma 3 has norms of heads, and two rotations."""

from dataclasses import replace

import numpy as np

from llm_serving.models.layers import decoder, gated_mlp, heads_of, network_of, rotary_of, self_attention
from llm_serving.models.model_config import Facts
from llm_serving.network.builder import Network
from llm_serving.network.operations import Float32Array, Value
from llm_serving.network.rope import Rotary

FULL, SLIDING = "full_attention", "sliding_attention"
NORMS = ("self_attn.q_norm", "self_attn.k_norm")


def gemma2(c: Facts) -> Network:
    rotary = rotary_of(c, heads_of(c))
    return _gemma(c, every=2, rotaries={FULL: rotary, SLIDING: rotary}, caps=(50.0, 30.0))


def gemma3(c: Facts) -> Network:
    heads = heads_of(c)
    full, sliding = rotary_of(c, heads, kind=FULL, theta=1e6), rotary_of(c, heads, kind=SLIDING)
    if not c.has("rope_parameters"):
        sliding = replace(sliding, theta=c.number("rope_local_base_freq", 10000.0), scaling=None)
    every = c.integer("sliding_window_pattern", 6)
    return _gemma(c, every=every, rotaries={FULL: full, SLIDING: sliding}, norms=NORMS)


def _gemma(
    c: Facts,
    *,
    every: int,
    rotaries: dict[str, Rotary],
    norms: tuple[str, str] | None = None,
    caps: tuple[float | None, float | None] = (None, None),
) -> Network:
    """`caps`, of scores and of logits, are those of a configuration that says nothing of them."""
    net, heads = network_of(c, plus_one), heads_of(c)
    num_layers, inner = c.integer("num_hidden_layers"), c.integer("intermediate_size")
    alternating = [SLIDING if (index + 1) % every else FULL for index in range(num_layers)]
    kinds = c.choices("layer_types", (FULL, SLIDING), num_layers) or alternating
    scale = c.number("query_pre_attn_scalar", 256.0) ** -0.5
    cap, last_cap = (
        c.number(key) if c.has(key) else usual if c.leaves_out(key) else None
        for key, usual in zip(("attn_logit_softcapping", "final_logit_softcapping"), caps, strict=True)
    )
    bias = c.boolean("attention_bias")
    c.choice("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")

    def layer(hidden: Value, index: int, at: str) -> Value:
        x = net.norm(hidden, at + "input_layernorm")
        window = c.integer("sliding_window", 4096) if kinds[index] == SLIDING else None
        rotary = rotaries[kinds[index]]
        x = self_attention(
            net, x, at, heads, rotary, norms=norms, bias=bias, out_bias=bias, scale=scale, window=window, cap=cap
        )
        hidden = net.add(hidden, net.norm(x, at + "post_attention_layernorm"))
        x = net.norm(hidden, at + "pre_feedforward_layernorm")
        x = gated_mlp(net, x, at + "mlp.", inner, function="gelu_tanh")
        return net.add(hidden, net.norm(x, at + "post_feedforward_layernorm"))

    table_scale = c.integer("hidden_size") ** 0.5
    return decoder(net, c, layer, tied=True, table_scale=table_scale, rounded_scale=True, cap=last_cap)


def plus_one(gain: Float32Array) -> Float32Array:
    """What a norm multiplies by."""
    return gain + np.float32(1)
