"""Baichuan 2: query, key and value are stacked in one tensor, and the rows of the LM head are normalised.

In a GGUF file, query, key and value are separate tensors (`separate_qkv`). The 7B model has rotary embeddings. The 13B
model has ALiBi (Press et al. 2021) and no `max_position_embeddings`.
"""

import numpy as np

from llm_serving.models.attention import QKV, attention_heads, rotary_embedding
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import attend, block_decoder, empty_network, gated
from llm_serving.network.builder import Network
from llm_serving.network.operations import Float32Array, Weight

FIRST_VOCABULARY = 64000


def baichuan2(c: ConfigReader) -> Network:
    if c.integer("vocab_size") == FIRST_VOCABULARY:
        raise c.fail("vocab_size", f"must not be {FIRST_VOCABULARY}: Baichuan 1, which has it, is not supported")
    net, heads = empty_network(c), attention_heads(c)
    has_rope = c.has("max_position_embeddings")
    names = QKV if c.boolean("separate_qkv") else ("self_attn.W_pack",)
    rotary = rotary_embedding(c, heads) if has_rope else None
    slopes = None if has_rope else Weight((), (heads.q,), generate=lambda _: alibi_slopes(heads.q), dtype="float32")
    attention = attend(net, heads, rotary, names=names, slopes=slopes)
    return block_decoder(net, c, attention, gated(net, c), lm_head_transform=unit_rows)


def unit_rows(head: Float32Array) -> Float32Array:
    length = np.sqrt(np.sum(head * head, axis=1, keepdims=True))
    rows: Float32Array = head / np.maximum(length, np.float32(1e-12))
    return rows


def alibi_slopes(heads: int) -> Float32Array:
    """Return the ALiBi slope of each head (Press et al. 2021).

    n is the largest power of two that is at most `heads`. The first n slopes are 2^(-8i/n) for i = 1, 2, ..., n. The
    slopes of further heads are 2^(-4i/n) for i = 1, 3, 5, ...
    """
    whole = 1 << heads.bit_length() - 1
    slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    more = [2 ** (-4 * (i + 1) / whole) for i in range(0, 2 * whole, 2)]
    return np.array([*slopes, *more][:heads], np.float32)
