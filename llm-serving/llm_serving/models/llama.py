"""Llama 2 and 3. The configuration specifies biases, tied embeddings and RoPE scaling."""

from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import (
    attention_heads,
    decoder,
    empty_network,
    gated_mlp,
    rotary_embedding,
    self_attention,
)
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


def llama(c: ConfigReader) -> Network:
    net, heads = empty_network(c), attention_heads(c)
    rotary, inner = rotary_embedding(c, heads), c.integer("intermediate_size")
    bias, mlp_bias = c.boolean("attention_bias"), c.boolean("mlp_bias")
    c.choice("hidden_act", ("silu",), "silu")

    def layer(hidden: Value, _: int, at: str) -> Value:
        x = net.rms_norm(hidden, at + "input_layernorm")
        hidden = net.add(hidden, self_attention(net, x, at, heads, rotary, bias=bias, out_bias=bias))
        x = net.rms_norm(hidden, at + "post_attention_layernorm")
        return net.add(hidden, gated_mlp(net, x, at + "mlp.", inner, bias=mlp_bias))

    return decoder(net, c, layer)
