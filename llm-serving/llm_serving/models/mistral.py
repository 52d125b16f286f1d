"""Mistral: a window, perhaps. Mixtral: experts under names of their own."""

from llm_serving.models.layers import (
    decoder,
    gated_mlp,
    heads_of,
    mixture,
    network_of,
    rotary_of,
    self_attention,
    window_of,
)
from llm_serving.models.model_config import Facts
from llm_serving.network.builder import Network, Routing
from llm_serving.network.operations import Value


def mistral(c: Facts) -> Network:
    experts = c.integer("num_local_experts") if c.has("num_local_experts") else 0
    net, heads = network_of(c, eps=1e-5 if experts else 1e-6), heads_of(c)
    rotary, inner = rotary_of(c, heads, theta=1e6 if experts else 10000.0), c.integer("intermediate_size")
    window = window_of(c, None if experts else 4096)
    c.choice("hidden_act", ("silu",), "silu")

    def layer(hidden: Value, _: int, at: str) -> Value:
        x = net.norm(hidden, at + "input_layernorm")
        hidden = net.add(hidden, self_attention(net, x, at, heads, rotary, window=window))
        x = net.norm(hidden, at + "post_attention_layernorm")
        if not experts:
            return net.add(hidden, gated_mlp(net, x, at + "mlp.", inner))
        routing = Routing(c.integer("num_experts_per_tok"))
        x = mixture(
            net, c, x, at + "block_sparse_moe.", experts, "intermediate_size", routing, parts=("w1", "w3", "w2")
        )
        return net.add(hidden, x)

    return decoder(net, c, layer)
