"""Llama 2 and 3: biases, a tied head and the stretched rotary embedding are facts of a model."""

from llm_serving.models.layers import decoder, gated_mlp, heads_of, network_of, rotary_of, self_attention
from llm_serving.models.model_config import Facts
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


def llama(c: Facts) -> Network:
    net, heads = network_of(c), heads_of(c)
    rotary, inner = rotary_of(c, heads), c.integer("intermediate_size")
    bias, mlp_bias = c.boolean("attention_bias"), c.boolean("mlp_bias")
    c.choice("hidden_act", ("silu",), "silu")

    def layer(hidden: Value, _: int, at: str) -> Value:
        x = net.norm(hidden, at + "input_layernorm")
        hidden = net.add(hidden, self_attention(net, x, at, heads, rotary, bias=bias, out_bias=bias))
        x = net.norm(hidden, at + "post_attention_layernorm")
        return net.add(hidden, gated_mlp(net, x, at + "mlp.", inner, bias=mlp_bias))

    return decoder(net, c, layer)
