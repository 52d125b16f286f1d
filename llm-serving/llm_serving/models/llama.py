"""Llama 2 and 3, and families that differ from it in a few places: Seed-OSS, SmolLM3, InternLM2 and 3."""

from llm_serving.models.attention import attention_heads, rotary_embedding
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import attend, block_decoder, empty_network, gated
from llm_serving.network.builder import Network


def llama(c: ConfigReader) -> Network:
    bias = c.boolean("attention_bias")
    return _llama(c, bias, bias, c.boolean("mlp_bias"))


def seed_oss(c: ConfigReader) -> Network:
    return _llama(c, c.boolean("attention_bias", True), c.boolean("attention_out_bias"), c.boolean("mlp_bias"))


def internlm3(c: ConfigReader) -> Network:
    """Build the network. `qkv_bias`: biases of query, key and value; `bias`: of attention output and MLP."""
    bias = c.boolean("bias")
    return _llama(c, c.boolean("qkv_bias"), bias, bias)


def _llama(c: ConfigReader, bias: bool, out_bias: bool, mlp_bias: bool) -> Network:
    net, heads = empty_network(c), attention_heads(c)
    attention = attend(net, heads, rotary_embedding(c, heads), bias=bias, out_bias=out_bias)
    return block_decoder(net, c, attention, gated(net, c, bias=mlp_bias))


def internlm2(c: ConfigReader) -> Network:
    """Build the network. Query, key and value are interleaved by KV head in one tensor."""
    net, heads, bias = empty_network(c), attention_heads(c), c.boolean("bias")
    names, out = ("attention.wqkv",), "attention.wo"
    attention = attend(
        net, heads, rotary_embedding(c, heads), names=names, out=out, grouped=True, bias=bias, out_bias=bias
    )
    feed_forward, before = gated(net, c, gate_up=("w1", "w3"), down="w2"), ("attention_norm", "ffn_norm")
    table, head, prefix = "model.tok_embeddings", "output", "feed_forward."
    return block_decoder(net, c, attention, feed_forward, before=before, prefix=prefix, table=table, head=head)


def smollm3(c: ConfigReader) -> Network:
    """Build the network. Some layers have no rotary embedding."""
    net, heads, num_layers = empty_network(c), attention_heads(c), c.integer("num_hidden_layers")
    rotary, every = rotary_embedding(c, heads, theta=2e6), c.integer("no_rope_layer_interval", 4)
    uses_rope = c.flags("no_rope_layers", num_layers) or [bool((index + 1) % every) for index in range(num_layers)]
    if c.boolean("use_sliding_window"):
        raise c.fail("use_sliding_window", "must be false")
    bias = c.boolean("attention_bias")
    attention = attend(net, heads, [rotary if each else None for each in uses_rope], bias=bias, out_bias=bias)
    return block_decoder(net, c, attention, gated(net, c, bias=c.boolean("mlp_bias")), tied=True)
