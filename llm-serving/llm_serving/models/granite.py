"""Granite: a Llama with factors for embeddings, scores, residuals and logits."""

from llm_serving.models.layers import decoder, gated_mlp, heads_of, network_of, rotary_of, self_attention
from llm_serving.models.model_config import Facts
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value


def granite(c: Facts) -> Network:
    net, heads = network_of(c), heads_of(c)
    rotary, inner = rotary_of(c, heads), c.integer("intermediate_size")
    scale, factor = c.number("attention_multiplier", 1.0), c.number("residual_multiplier", 1.0)
    bias, mlp_bias = c.boolean("attention_bias"), c.boolean("mlp_bias")
    c.choice("hidden_act", ("silu",), "silu")

    def layer(hidden: Value, _: int, at: str) -> Value:
        x = net.norm(hidden, at + "input_layernorm")
        x = self_attention(net, x, at, heads, rotary, scale=scale, bias=bias, out_bias=bias)
        hidden = net.add(hidden, x, factor)
        x = net.norm(hidden, at + "post_attention_layernorm")
        return net.add(hidden, gated_mlp(net, x, at + "mlp.", inner, bias=mlp_bias), factor)

    table_scale, logits_scale = c.number("embedding_multiplier", 1.0), 1 / c.number("logits_scaling", 1.0)
    return decoder(net, c, layer, table_scale=table_scale, scale=logits_scale)
