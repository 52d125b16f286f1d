"""Phi-3 and Phi-4: query, key and value are stacked, and so are gate and up. Only part of each head may rotate.
Phi-3.5-MoE has layer norms, experts chosen by SparseMixer, and biases.
"""

from dataclasses import replace

from llm_serving.models.attention import (
    Heads,
    attention_heads,
    rope_config,
    rotary_embedding,
    self_attention,
    sliding_window,
)
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import decoder, empty_network, gated_mlp
from llm_serving.models.mixtures import mixture_of_experts
from llm_serving.network.builder import Network
from llm_serving.network.experts import ExpertRouting
from llm_serving.network.operations import Value
from llm_serving.network.rope import Rotary

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


def phimoe(c: ConfigReader) -> Network:
    net, heads = empty_network(c, eps=1e-5), attention_heads(c)
    rotary, window, bias = _scaled_rotary(c, heads), sliding_window(c), c.boolean("attention_bias")
    if c.integer("num_experts_per_tok", 2) != 2:
        raise c.fail("num_experts_per_tok", "must be 2")
    routing = ExpertRouting(2, "sparsemixer", margin=2 * c.number("router_jitter_noise", 0.01))
    experts = c.integer("num_local_experts", 16)
    c.choice("hidden_act", ("silu",), "silu")

    def normalize(x: Value, name: str) -> Value:
        return net.layer_norm(x, name, bias=True)

    def layer(hidden: Value, _: int, at: str) -> Value:
        x = normalize(hidden, at + "input_layernorm")
        hidden = net.add(hidden, self_attention(net, x, at, heads, rotary, window=window, bias=bias, out_bias=bias))
        x, at = normalize(hidden, at + "post_attention_layernorm"), at + "block_sparse_moe."
        parts = "w1", "w3", "w2"
        return net.add(hidden, mixture_of_experts(net, c, x, at, experts, "intermediate_size", routing, parts=parts))

    return decoder(net, c, layer, normalize=normalize, head_bias=c.boolean("lm_head_bias"))


def _scaled_rotary(c: ConfigReader, heads: Heads) -> Rotary:
    rotary, reader = rotary_embedding(c, heads, theta=1e6), rope_config(c)
    if rotary.scaling is None:
        return rotary
    if rotary.scaling.kind != "longrope":
        raise reader.fail("type", "must be longrope or absent")
    factor = reader.number("long_mscale")
    if reader.number("short_mscale") != factor:
        raise reader.fail("short_mscale", f"must equal `long_mscale` {factor}")
    return replace(rotary, scaling=replace(rotary.scaling, attention_factor=factor))
