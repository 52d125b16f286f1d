"""Reads the settings of mixtures of experts, and adds their layers to a network, for all model families."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from llm_serving.formats.block_tensor import PANEL_ROWS
from llm_serving.models.attention import MAX_WIDTH
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.layers import Layer, gated_mlp
from llm_serving.network.builder import Network
from llm_serving.network.experts import Expert, ExpertRouting, ExpertStacks
from llm_serving.network.operations import Value

MAX_EXPERT_COLUMNS: Final = 2**21
BLOCK_SPARSE: Final = ("w1", "w3", "w2")
"""Names of an expert's gate, up and down tensors in Mixtral and families with its layout."""


def mixture_of_experts(
    net: Network,
    c: ConfigReader,
    x: Value,
    at: str,
    count: int,
    inner_key: str,
    routing: ExpertRouting,
    *,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    router: str = "gate",
    stacks: ExpertStacks | None = None,
    top_k_key: str = "num_experts_per_tok",
    routed: Value | None = None,
) -> Value:
    """Add a router and `count` experts.

    Args:
        at: Prefix of all tensor names, before the names in `routing`, `parts`, `router` and `stacks`.
        inner_key, top_k_key: Configuration keys of the experts' intermediate size and of `routing.top_k`.
        parts: Names of an expert's gate, up and down tensors. The expert's number precedes them. The name of the gate
            is empty if experts have none.
        stacks: Tensors that hold all experts, instead of `parts`. They are not used if the configuration has
            `separate_experts`, as that of a GGUF file.
        routed: Input of the router. None means x.
    """
    inner = c.integer(inner_key)
    if count % routing.groups:
        raise c.fail("n_routed_experts", f"must be a multiple of `n_group` {routing.groups}")
    if routing.top_groups > routing.groups:
        raise c.fail("topk_group", f"must be at most `n_group` {routing.groups}")
    if routing.top_k > count // routing.groups * routing.top_groups:
        share = "" if routing.groups == 1 else f" in {routing.top_groups} of {routing.groups} groups"
        raise c.fail(top_k_key, f"must be at most the number of experts{share}; there are {count}")
    if x.width % PANEL_ROWS:
        key = "hidden_size" if x.width == net.hidden else "moe_latent_size"
        raise c.fail(key, f"must be a multiple of {PANEL_ROWS} in a model with experts")
    if count * inner > MAX_EXPERT_COLUMNS:
        raise c.fail(inner_key, f"must be at most {MAX_EXPERT_COLUMNS // count} for {count} experts")
    names: Sequence[Expert] | ExpertStacks
    if stacks is None or c.boolean("separate_experts"):
        prefixes = [f"{at}experts.{number}." for number in range(count)]
        names = [Expert(*(each + part if part else "" for part in parts)) for each in prefixes]
    else:
        biases = tuple(at + name for name in stacks.biases)
        names = replace(stacks, gate_up=at + stacks.gate_up, down=at + stacks.down, biases=biases)
    if routing.correction is not None:
        routing = replace(routing, correction=at + routing.correction)
    if routing.factors is not None:
        routing = replace(routing, factors=at + routing.factors)
    return net.experts(x, at + router, routing, names, inner, routed=routed)


def routed_experts(
    net: Network, c: ConfigReader, count: int, inner_key: str, routing: ExpertRouting, **options: Any
) -> Layer:
    """Return `mixture_of_experts` as a part of a layer."""
    return lambda x, _, at: mixture_of_experts(net, c, x, at, count, inner_key, routing, **options)


def routed_and_shared_experts(net: Network, c: ConfigReader, routing: ExpertRouting, first: int, shared: int) -> Layer:
    """Return the feed-forward blocks of DeepSeek-V3: routed experts, and one gated MLP of size `shared` for all shared
    experts. Layers before layer `first` have a gated MLP of the size `intermediate_size` instead.
    """
    count = c.integer("n_routed_experts")
    c.choice("hidden_act", ("silu",), "silu")

    def feed_forward(x: Value, index: int, at: str) -> Value:
        if index < first:
            return gated_mlp(net, x, at, c.integer("intermediate_size"))
        routed = mixture_of_experts(net, c, x, at, count, "moe_intermediate_size", routing)
        return net.add(routed, gated_mlp(net, x, at + "shared_experts.", shared))

    return feed_forward


def shared_experts_size(c: ConfigReader, count_key: str, default: int | None = None, *, least: int = 1) -> int:
    """Return the total intermediate size of a layer's shared experts. `least`: minimum number of shared experts."""
    count, inner = c.integer(count_key, default, least=least), c.integer("moe_intermediate_size")
    if count * inner > MAX_WIDTH:
        raise c.fail(count_key, f"times `moe_intermediate_size` {inner} must be at most {MAX_WIDTH}")
    return count * inner


def sigmoid_routing(c: ConfigReader, groups: tuple[int, int], scale: float) -> ExpertRouting:
    """Return the routing of DeepSeek-V3 without auxiliary loss (section 2.1.2). `groups` and `scale` are defaults of
    `n_group`, `topk_group` and `routed_scaling_factor`. Raise ModelError for a configuration that differs from it.
    """
    c.choice("topk_method", ("noaux_tc",), "noaux_tc")
    c.choice("scoring_func", ("sigmoid",), "sigmoid")
    return ExpertRouting(
        c.integer("num_experts_per_tok"),
        score="sigmoid",
        normalise=c.boolean("norm_topk_prob", True),
        scale=c.number("routed_scaling_factor", scale),
        groups=c.integer("n_group", groups[0]),
        top_groups=c.integer("topk_group", groups[1]),
        correction="gate.e_score_correction_bias",
    )
