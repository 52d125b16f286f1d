"""Qwen2 has biases of query, key and value; Qwen3 has norms of heads instead. Both may have experts in most layers."""

from functools import partial

from llm_serving.models.attention import HEAD_NORMS, attention_heads, rotary_embedding, sliding_window
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import FULL, SLIDING, attend, block_decoder, empty_network, gated_mlp
from llm_serving.models.mixtures import mixture_of_experts
from llm_serving.network.builder import Network
from llm_serving.network.experts import ExpertRouting, ExpertStacks
from llm_serving.network.operations import Value


def qwen2(c: ConfigReader) -> Network:
    return _qwen(c, bias=c.boolean("qkv_bias", True))


def qwen3(c: ConfigReader) -> Network:
    bias = c.boolean("attention_bias")
    return _qwen(c, bias=bias, out_bias=bias, norms=HEAD_NORMS)


def _qwen(c: ConfigReader, *, bias: bool, out_bias: bool = False, norms: tuple[str, str] | None = None) -> Network:
    net, heads = empty_network(c), attention_heads(c)
    rotary, num_layers = rotary_embedding(c, heads), c.integer("num_hidden_layers")
    experts = next((c.integer(key) for key in ("num_experts", "num_local_experts") if c.has(key)), 0)
    c.choice("hidden_act", ("silu",), "silu")

    first = c.integer("max_window_layers", 28, least=0) if c.boolean("use_sliding_window") else num_layers
    usual = [SLIDING if index >= first else FULL for index in range(num_layers)]
    kinds = c.choices("layer_types", (FULL, SLIDING), num_layers) or usual
    window = [sliding_window(c, 4096) if kind == SLIDING else None for kind in kinds]
    attention = attend(net, heads, rotary, norms=norms, window=window, bias=bias, out_bias=out_bias)
    return block_decoder(net, c, attention, partial(feed_forward, net, c, experts))


def feed_forward(
    net: Network,
    c: ConfigReader,
    experts: int,
    x: Value,
    index: int,
    at: str,
    *,
    stacks: ExpertStacks | None = None,
    normalise: bool = False,
) -> Value:
    """Add the feed-forward block of layer `index`: a gated MLP if it is dense, else experts and any shared expert."""
    dense, every = c.integers("mlp_only_layers"), c.integer("decoder_sparse_step", 1)
    if not experts or index in dense or (index + 1) % every:
        return gated_mlp(net, x, at, c.integer("intermediate_size"))
    routing = ExpertRouting(c.integer("num_experts_per_tok"), normalise=c.boolean("norm_topk_prob", normalise))
    routed = mixture_of_experts(net, c, x, at, experts, "moe_intermediate_size", routing, stacks=stacks)
    if not c.has("shared_expert_intermediate_size"):
        return routed
    shared = gated_mlp(net, x, at + "shared_expert.", c.integer("shared_expert_intermediate_size"))
    return net.add(routed, net.sigmoid_gate(shared, net.linear(x, at + "shared_expert_gate", 1)))
