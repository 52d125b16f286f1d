"""Baichuan 2: query, key and value are stored stacked, and rows of the head have length 1.

The 7B turns; the 13B has ALiBi (Press et al. 2021), and tells so by having no `max_position_embeddings`.
"""

import numpy as np

from llm_serving.models.layers import decoder, gated_mlp, heads_of, network_of, rotary_of, self_attention
from llm_serving.models.model_config import Facts
from llm_serving.network.builder import Network
from llm_serving.network.operations import Float32Array, Value, Weight

FIRST_VOCABULARY = 64000
"""Of Baichuan 1, whose head is used as it is stored."""


def baichuan2(c: Facts) -> Network:
    if c.integer("vocab_size") == FIRST_VOCABULARY:
        raise c.fail("vocab_size", "must be that of Baichuan 2; Baichuan 1 is not supported")
    net, heads = network_of(c), heads_of(c)
    inner, turns = c.integer("intermediate_size"), c.has("max_position_embeddings")
    rotary = rotary_of(c, heads) if turns else None
    slopes = None if turns else Weight((), (heads.q,), made=lambda _: alibi_slopes(heads.q), kind="float32")
    c.choice("hidden_act", ("silu",), "silu")

    def layer(hidden: Value, _: int, at: str) -> Value:
        x = net.norm(hidden, at + "input_layernorm")
        hidden = net.add(hidden, self_attention(net, x, at, heads, rotary, names=("self_attn.W_pack",), slopes=slopes))
        x = net.norm(hidden, at + "post_attention_layernorm")
        return net.add(hidden, gated_mlp(net, x, at + "mlp.", inner))

    return decoder(net, c, layer, change_head=unit_rows)


def unit_rows(head: Float32Array) -> Float32Array:
    """Rows of length 1."""
    length = np.sqrt(np.sum(head * head, axis=1, keepdims=True))
    rows: Float32Array = head / np.maximum(length, np.float32(1e-12))
    return rows


def alibi_slopes(heads: int) -> Float32Array:
    """Powers of 2^(-8 / n), n the power of two below `heads`; the others are every second one of twice as many."""
    whole = 1 << heads.bit_length() - 1
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    more = [2 ** (-4 * (i + 1) / whole) for i in range(0, 2 * whole, 2)]
    return np.array([*slopes, *more][:heads], np.float32)
