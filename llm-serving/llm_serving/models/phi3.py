"""Phi-3 and Phi-4: query, key and value are stacked, and so are gate and up. Only part of each head may rotate.
Phi-3.5-MoE has layer norms, experts chosen by SparseMixer, and biases.
"""

from dataclasses import replace
from functools import partial

from llm_serving.models.attention import Heads, attention_heads, rope_config, rotary_embedding, sliding_window
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import attend, block_decoder, empty_network, gated
from llm_serving.models.mixtures import BLOCK_SPARSE, routed_experts
from llm_serving.network.builder import Network
from llm_serving.network.experts import ExpertRouting
from llm_serving.network.rope import Rotary

QKV = ("self_attn.qkv_proj",)


def phi3(c: ConfigReader) -> Network:
    net, heads = empty_network(c, eps=1e-5), attention_heads(c)
    rotary, window, bias = rotary_embedding(c, heads), sliding_window(c), c.boolean("attention_bias")
    attention = attend(net, heads, rotary, names=QKV, window=window, bias=bias, out_bias=bias)
    return block_decoder(net, c, attention, gated(net, c, gate_up=("gate_up_proj",)))


def phimoe(c: ConfigReader) -> Network:
    net, heads = empty_network(c, eps=1e-5), attention_heads(c)
    rotary, window, bias = _scaled_rotary(c, heads), sliding_window(c), c.boolean("attention_bias")
    if c.integer("num_experts_per_tok", 2) != 2:
        raise c.fail("num_experts_per_tok", "must be 2")
    routing = ExpertRouting(2, "sparsemixer", margin=2 * c.number("router_jitter_noise", 0.01))
    experts = c.integer("num_local_experts", 16)
    c.choice("hidden_act", ("silu",), "silu")
    feed_forward = routed_experts(net, c, experts, "intermediate_size", routing, parts=BLOCK_SPARSE)
    attention = attend(net, heads, rotary, window=window, bias=bias, out_bias=bias)
    norm, head_bias = partial(net.layer_norm, bias=True), c.boolean("lm_head_bias")
    return block_decoder(
        net, c, attention, feed_forward, prefix="block_sparse_moe.", normalize=norm, head_bias=head_bias
    )


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
