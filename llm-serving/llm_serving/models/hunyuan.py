"""Hunyuan: norms of heads follow the rotary embedding. The larger models have experts beside a shared one."""

from dataclasses import replace

from llm_serving.models.attention import Heads, attention_heads, rope_config, rotary_embedding
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import attend, block_decoder, empty_network, gated
from llm_serving.models.mixtures import mixture_of_experts
from llm_serving.network.builder import Network
from llm_serving.network.experts import ExpertRouting
from llm_serving.network.operations import Value
from llm_serving.network.rope import Rotary

NORMS = ("self_attn.query_layernorm", "self_attn.key_layernorm")


def hunyuan(c: ConfigReader) -> Network:
    net, heads = empty_network(c, eps=1e-5), attention_heads(c)
    bias, dense = c.boolean("attention_bias"), gated(net, c)
    experts = _of_all_layers(c, "num_experts") if c.has("num_experts") else 0

    def feed_forward(x: Value, index: int, at: str) -> Value:
        if not experts:
            return dense(x, index, at)
        routing = ExpertRouting(_of_all_layers(c, "moe_topk"))
        routed = mixture_of_experts(
            net, c, x, at, experts, "intermediate_size", routing, router="gate.wg", top_k_key="moe_topk"
        )
        return net.add(routed, dense(x, index, at + "shared_mlp."))

    attention = attend(net, heads, _rotary(c, heads), norms=NORMS, norms_after_rope=True, bias=bias, out_bias=bias)
    return block_decoder(net, c, attention, feed_forward)


def _of_all_layers(c: ConfigReader, key: str) -> int:
    value = c.config.get(key)
    if not isinstance(value, list):
        return c.integer(key, 1)
    if not value or any(each != value[0] for each in value):
        raise c.fail(key, "must be equal in all layers")
    return ConfigReader({key: value[0]}, c.where).integer(key)


def _rotary(c: ConfigReader, heads: Heads) -> Rotary:
    """Read the rotary embedding. Its base is scaled by the constant `alpha`, not by the length of the context."""
    rotary, reader = rotary_embedding(ConfigReader({**c.config, **_NO_SCALING}, c.where), heads), rope_config(c)
    if not reader.has("alpha"):
        return rotary_embedding(c, heads)
    if heads.own == 2:
        raise reader.fail("alpha", "must be absent if only 2 elements of a head are rotated")
    theta = reader.number("rope_theta", rotary.theta)
    return replace(rotary, theta=theta * reader.number("alpha") ** (heads.own / (heads.own - 2)))


_NO_SCALING = {"rope_scaling": None, "rope_parameters": None}
