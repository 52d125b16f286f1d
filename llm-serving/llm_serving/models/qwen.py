"""Qwen2: biases of query, key and value. Qwen3: norms of heads instead. Both: experts in most layers, perhaps."""

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

NORMS = ("self_attn.q_norm", "self_attn.k_norm")


def qwen2(c: Facts) -> Network:
    return _qwen(c, bias=c.boolean("qkv_bias", True))


def qwen3(c: Facts) -> Network:
    bias = c.boolean("attention_bias")
    return _qwen(c, bias=bias, out_bias=bias, norms=NORMS)


def _qwen(c: Facts, *, bias: bool, out_bias: bool = False, norms: tuple[str, str] | None = None) -> Network:
    net, heads = network_of(c), heads_of(c)
    rotary, num_layers = rotary_of(c, heads), c.integer("num_hidden_layers")
    experts = next((c.integer(key) for key in ("num_experts", "num_local_experts") if c.has(key)), 0)
    dense, every = c.integers("mlp_only_layers"), c.integer("decoder_sparse_step", 1)
    c.choice("hidden_act", ("silu",), "silu")

    def feed_forward(x: Value, index: int, at: str) -> Value:
        if not experts or index in dense or (index + 1) % every:
            return gated_mlp(net, x, at, c.integer("intermediate_size"))
        routing = Routing(c.integer("num_experts_per_tok"), normalise=c.boolean("norm_topk_prob"))
        routed = mixture(net, c, x, at, experts, "moe_intermediate_size", routing)
        if not c.has("shared_expert_intermediate_size"):
            return routed
        shared = gated_mlp(net, x, at + "shared_expert.", c.integer("shared_expert_intermediate_size"))
        return net.add(routed, net.weigh(shared, net.linear(x, at + "shared_expert_gate", 1)))

    def window(index: int) -> int | None:
        slides = c.boolean("use_sliding_window") and index >= c.integer("max_window_layers", 28, least=0)
        kinds = c.choices("layer_types", ("full_attention", "sliding_attention"), num_layers)
        slides = slides if kinds is None else kinds[index] == "sliding_attention"
        return window_of(c, 4096) if slides else None

    def layer(hidden: Value, index: int, at: str) -> Value:
        x = net.norm(hidden, at + "input_layernorm")
        seen = window(index)
        x = self_attention(net, x, at, heads, rotary, norms=norms, window=seen, bias=bias, out_bias=out_bias)
        hidden = net.add(hidden, x)
        x = net.norm(hidden, at + "post_attention_layernorm")
        return net.add(hidden, feed_forward(x, index, at + "mlp."))

    return decoder(net, c, layer)
