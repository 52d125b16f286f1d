"""Nemotron-H: a layer is Mamba-2, attention without rotary embedding, a feed-forward block with a squared ReLU, or a
mixture of such blocks (Nemotron 3), whose input may be a narrower projection of the rows.
"""

import math
from dataclasses import replace

from llm_serving.models.attention import attention_heads, self_attention
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import decoder, empty_network
from llm_serving.models.mamba import Mamba, checked, mamba_mixer
from llm_serving.models.mixtures import mixture_of_experts, sigmoid_routing
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value

MAMBA, ATTENTION, MLP, EXPERTS = "M*-E"
KINDS = {
    "mamba": MAMBA,
    "linear_attention": MAMBA,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "mlp": MLP,
    "moe": EXPERTS,
}
"""Kind of a layer in `layers_block_type` -> its character in `hybrid_override_pattern`."""


def nemotron_h(c: ConfigReader) -> Network:
    net = empty_network(c, eps=1e-5, eps_key="layer_norm_epsilon")
    heads = attention_heads(c if c.has("head_dim") else ConfigReader({**c.config, "head_dim": 128}, c.where))
    pattern, mamba = _pattern(c), _mamba_sizes(c)
    inner, bias = c.integer("intermediate_size"), c.boolean("mlp_bias")
    c.choice("mlp_hidden_act", ("relu2",), "relu2")
    c.choice("mamba_hidden_act", ("silu",), "silu")
    names = [f"mixer.{part}_proj" for part in "qkv"]

    def layer(hidden: Value, index: int, at: str) -> Value:
        x = net.rms_norm(hidden, at + "norm")
        if pattern[index] == MAMBA:
            x = mamba_mixer(net, x, at + "mixer.", mamba)
        elif pattern[index] == ATTENTION:
            x = self_attention(net, x, at, heads, None, names=names, out="mixer.o_proj")
        elif pattern[index] == EXPERTS:
            x = _experts(net, c, x, at + "mixer.", bias=bias)
        else:
            x = _squared_relu(net, x, at + "mixer.", inner, bias=bias)
        return net.add(hidden, x)

    net.allow_unused("mtp.")  # multi-token prediction, which is not used
    return decoder(net, c, layer, table="backbone.embeddings", layers="backbone.layers", norm="backbone.norm_f")


def _squared_relu(net: Network, x: Value, at: str, inner: int, *, bias: bool) -> Value:
    x = net.linear(x, at + "up_proj", inner, bias=bias)
    return net.linear(net.multiply(x, x, "relu"), at + "down_proj", net.hidden, bias=bias)


def _experts(net: Network, c: ConfigReader, x: Value, at: str, *, bias: bool) -> Value:
    routing, narrow = replace(sigmoid_routing(c, (1, 1), 1.0), function="relu2"), x
    latent = c.integer("moe_latent_size") if c.has("moe_latent_size") else 0
    if latent:
        narrow = net.linear(x, at + "fc1_latent_proj", latent, bias=bias)
    names = "", "up_proj", "down_proj"
    count = c.integer("n_routed_experts", 8)
    y = mixture_of_experts(net, c, narrow, at, count, "moe_intermediate_size", routing, parts=names, routed=x)
    if latent:
        y = net.linear(y, at + "fc2_latent_proj", net.hidden, bias=bias)
    shared = c.integer("moe_shared_expert_intermediate_size", 7688)
    return net.add(y, _squared_relu(net, x, at + "shared_experts.", shared, bias=bias))


def _pattern(c: ConfigReader) -> str:
    count = c.integer("num_hidden_layers")
    kinds = c.choices("layers_block_type", tuple(KINDS), count)
    pattern = c.config.get("hybrid_override_pattern") if kinds is None else "".join(KINDS[kind] for kind in kinds)
    if not isinstance(pattern, str) or len(pattern) != count or set(pattern) - {MAMBA, ATTENTION, MLP, EXPERTS}:
        known = f"{MAMBA}, {ATTENTION}, {MLP} or {EXPERTS}"
        raise c.fail("hybrid_override_pattern", f"must be {count} characters, each {known}")
    return pattern


def _mamba_sizes(c: ConfigReader) -> Mamba:
    heads, head_dim = c.integer("mamba_num_heads", 128), c.integer("mamba_head_dim", 64)
    sizes = c.integer("n_groups", 8), c.integer("ssm_state_size", 128), c.integer("conv_kernel", 4)
    limits = c.number("time_step_min", 0.001), math.inf
    biases = c.boolean("use_bias"), c.boolean("use_conv_bias", True)
    return checked(c, "mamba_num_heads", Mamba(heads, head_dim, *sizes, *biases, limits=limits))
