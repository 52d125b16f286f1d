"""Phi-3 and Phi-4: query, key and value are stacked, and so are gate and up. Only part of each head may rotate."""

from llm_serving.models.attention import attention_heads, rotary_embedding, self_attention, sliding_window
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import decoder, empty_network, gated_mlp
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value

QKV = ("self_attn.qkv_proj",)


def phi3(c: ConfigReader) -> Network:
    net, heads = empty_network(c, eps=1e-5), attention_heads(c)
    rotary, window, inner = rotary_embedding(c, heads), sliding_window(c), c.integer("intermediate_size")
    bias = c.boolean("attention_bias")
    c.choice("hidden_act", ("silu",), "silu")

    def layer(hidden: Value, _: int, at: str) -> Value:
        x = net.rms_norm(hidden, at + "input_layernorm")
        x = self_attention(net, x, at, heads, rotary, names=QKV, window=window, bias=bias, out_bias=bias)
        hidden = net.add(hidden, x)
        x = net.rms_norm(hidden, at + "post_attention_layernorm")
        return net.add(hidden, gated_mlp(net, x, at + "mlp.", inner, gate_up=("gate_up_proj",)))

    return decoder(net, c, layer)
