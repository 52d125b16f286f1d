"""DeepSeek-V2 to V3.2, R1, Kimi-K2, GLM-4.7-Flash and GLM-5: latent attention (MLA), routed and shared experts."""

from __future__ import annotations

from functools import partial

from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.latent_attention import Indexing, LatentAttention
from llm_serving.models.layers import NEXTN, block_decoder, empty_network
from llm_serving.models.mixtures import routed_and_shared_experts, shared_experts_size, sigmoid_routing
from llm_serving.network.builder import Network
from llm_serving.network.experts import ExpertRouting


def deepseek_v2(c: ConfigReader) -> Network:
    method = c.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    groups = (1, 1) if method == "greedy" else (c.integer("n_group"), c.integer("topk_group"))
    c.choice("scoring_func", ("softmax",), "softmax")
    if c.boolean("norm_topk_prob"):
        raise c.fail("norm_topk_prob", "must be false")
    scale = c.number("routed_scaling_factor", 1.0)
    top_k = c.integer("num_experts_per_tok")
    routing = ExpertRouting(top_k, normalise=False, scale=scale, groups=groups[0], top_groups=groups[1])
    return _deepseek(c, routing, c.integer("first_k_dense_replace", 0, least=0))


def deepseek_v3(c: ConfigReader) -> Network:
    if not c.boolean("rope_interleave", True):
        raise c.fail("rope_interleave", "must be true")
    return _deepseek(c, sigmoid_routing(c, (8, 4), 2.5), c.integer("first_k_dense_replace", 3, least=0))


def glm4_moe_lite(c: ConfigReader) -> Network:
    return _deepseek(c, sigmoid_routing(c, (1, 1), 1.8), _num_dense(c, 1), eps=1e-5)


def deepseek_v32(c: ConfigReader) -> Network:
    routing = sigmoid_routing(c, (8, 4), 2.5)
    return _deepseek(c, routing, _num_dense(c, 3), LatentAttention(c, Indexing(64, interleaved=False)))


def glm_moe_dsa(c: ConfigReader) -> Network:
    attention = LatentAttention(c, Indexing(32, interleaved=True, shared=_shared_layers(c)))
    return _deepseek(c, sigmoid_routing(c, (1, 1), 2.5), _num_dense(c, 3), attention, eps=1e-5)


def _num_dense(c: ConfigReader, default: int) -> int:
    count = c.integer("num_hidden_layers")
    kinds = c.choices("mlp_layer_types", ("dense", "sparse"), count)
    if kinds is None:
        return c.integer("first_k_dense_replace", default, least=0)
    first = kinds.index("sparse") if "sparse" in kinds else count
    if "dense" in kinds[first:]:
        raise c.fail("mlp_layer_types", "must have all `dense` layers first")
    return first


def _shared_layers(c: ConfigReader) -> set[int]:
    """Return the indices of layers that attend to the keys which an earlier layer's indexer selected."""
    count, pattern = c.integer("num_hidden_layers"), c.config.get("index_topk_pattern")
    kinds = c.choices("indexer_types", ("full", "shared"), count)
    if kinds is None and pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != count or set(pattern) - {"F", "S"}:
            raise c.fail("index_topk_pattern", f"must be a text of {count} letters, each F or S")
        kinds = ["full" if each == "F" else "shared" for each in pattern]
    if kinds is None:
        every, skipped = c.integer("index_topk_freq", 1), c.integer("index_skip_topk_offset", 2, least=0)
        kinds = ["shared" if max(index - skipped + 1, 0) % every else "full" for index in range(count)]
    if kinds[0] != "full":
        raise c.fail("indexer_types", "must begin with `full`")
    return {index for index, kind in enumerate(kinds) if kind == "shared"}


def _deepseek(
    c: ConfigReader,
    routing: ExpertRouting,
    first: int,
    attention: LatentAttention | None = None,
    *,
    eps: float = 1e-6,
) -> Network:
    net, attention = empty_network(c, eps=eps), attention or LatentAttention(c)
    shared = shared_experts_size(c, "n_shared_experts")
    if c.integer("moe_layer_freq", 1) != 1:
        raise c.fail("moe_layer_freq", "must be 1")
    if c.boolean("attention_bias"):
        raise c.fail("attention_bias", "must be false")
    feed_forward = routed_and_shared_experts(net, c, routing, first, shared)
    return block_decoder(net, c, partial(attention, net), feed_forward, mtp_names=NEXTN)
