"""Llama 2 and 3, and Seed-OSS. The configuration specifies biases, tied embeddings and RoPE scaling."""

from llm_serving.models.attention import attention_heads, rotary_embedding, self_attention
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import empty_network, gated_mlp, pre_norm
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


def llama(c: ConfigReader) -> Network:
    bias = c.boolean("attention_bias")
    return llama_like(c, bias, bias, c.boolean("mlp_bias"))


def seed_oss(c: ConfigReader) -> Network:
    return llama_like(c, c.boolean("attention_bias", True), c.boolean("attention_out_bias"), c.boolean("mlp_bias"))


def llama_like(c: ConfigReader, bias: bool, out_bias: bool, mlp_bias: bool) -> Network:
    net, heads = empty_network(c), attention_heads(c)
    rotary, inner = rotary_embedding(c, heads), c.integer("intermediate_size")
    c.choice("hidden_act", ("silu",), "silu")

    def attention(x: Value, _: int, at: str) -> Value:
        return self_attention(net, x, at, heads, rotary, bias=bias, out_bias=out_bias)

    def feed_forward(x: Value, _: int, at: str) -> Value:
        return gated_mlp(net, x, at, inner, bias=mlp_bias)

    return pre_norm(net, c, attention, feed_forward)
