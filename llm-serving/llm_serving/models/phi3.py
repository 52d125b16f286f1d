"""Phi-3 and Phi-4: query, key and value are stored stacked, gate and up too; perhaps a part of each head turns."""

from llm_serving.models.layers import decoder, gated_mlp, heads_of, network_of, rotary_of, self_attention, window_of
from llm_serving.models.model_config import Facts
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value

QKV = ("self_attn.qkv_proj",)


def phi3(c: Facts) -> Network:
    net, heads = network_of(c, eps=1e-5), heads_of(c)
    rotary, window, inner = rotary_of(c, heads), window_of(c), c.integer("intermediate_size")
    bias = c.boolean("attention_bias")
    c.choice("hidden_act", ("silu",), "silu")

    def layer(hidden: Value, _: int, at: str) -> Value:
        x = net.norm(hidden, at + "input_layernorm")
        x = self_attention(net, x, at, heads, rotary, names=QKV, window=window, bias=bias, out_bias=bias)
        hidden = net.add(hidden, x)
        x = net.norm(hidden, at + "post_attention_layernorm")
        return net.add(hidden, gated_mlp(net, x, at + "mlp.", inner, gate_up=("gate_up_proj",)))

    return decoder(net, c, layer)
