"""Arguments of the configuration classes of MindFormers' inference networks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from llm_serving.models.attention import attention_heads
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.mindformers import MINDFORMERS_CLASSES
from llm_serving.models.mindformers_latent import latent_attentions
from llm_serving.models.spec import CONFIG_NAME, ModelSpec
from llm_serving.network.builder import Network


def config_arguments(spec: ModelSpec, dtype: str, max_positions: int) -> Mapping[str, Any]:
    c, classes = ConfigReader(spec.config, CONFIG_NAME), MINDFORMERS_CLASSES[spec.architecture]
    has_bias = any("bias" in each.weights for each in spec.network.operations if each.kind == "linear")
    types = ("params_dtype", "compute_dtype", "layernorm_compute_dtype", "rotary_dtype")
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.network.hidden,
        "intermediate_size": c.integer("intermediate_size"),
        "num_hidden_layers": len(spec.caches),
        **_attention_arguments(c, spec.network),
        "rms_norm_eps": c.number("rms_norm_eps", 1e-6),
        "hidden_act": "silu",
        "attention_bias": has_bias,
        "tie_word_embeddings": c.boolean("tie_word_embeddings"),
        # The rotary tables are replaced by ours, which cover every RoPE scaling.
        "position_embedding_type": "rope",
        "max_position_embeddings": max_positions,
        "use_flash_attention": True,
        "softmax_compute_dtype": "float32",
        **dict.fromkeys(types, dtype),
        **_expert_arguments(spec.network, dtype, classes.num_experts),
        **classes.config_arguments,
        **_group_arguments(spec.network),
        **{key: _typed(c, key) for key in classes.copied if c.has(key)},
    }


def _attention_arguments(c: ConfigReader, network: Network) -> Mapping[str, Any]:
    latent = latent_attentions(network)
    if not latent:
        heads = attention_heads(c)
        return {"num_attention_heads": heads.q, "num_key_value_heads": heads.kv, "head_dim": heads.own}
    heads_of_queries = c.integer("num_attention_heads")
    dim = c.integer("qk_nope_head_dim") + c.integer("qk_rope_head_dim")
    # MindFormers divides scores by the root of `dim`, and multiplies them by (0.1 * mscale * log(factor) + 1) ** 2.
    factor = math.sqrt(latent[0].attributes["scale"] * math.sqrt(dim))
    return {
        "num_attention_heads": heads_of_queries,
        "num_key_value_heads": heads_of_queries,
        "rotary_scaling_factor": math.e,
        "mscale": 10 * (factor - 1),
    }


def _typed(c: ConfigReader, key: str) -> Any:
    """Return a value of config.json. If it is a text, convert it to a number."""
    return c.number(key) if isinstance(c.config[key], str) else c.config[key]


def _expert_arguments(network: Network, dtype: str, num_experts: str) -> Mapping[str, Any]:
    """Return MindFormers' arguments about experts. `num_experts`: name of the argument for the number of experts."""
    found: dict[str, Any] = {}
    for each in network.operations:
        if each.kind == "route":
            found |= {"num_experts_per_tok": each.attributes["top_k"], "norm_topk_prob": each.attributes["normalise"]}
        elif each.kind == "experts":
            found |= {"moe_intermediate_size": each.weights["down"].shape[1], "moe_router_dtype": dtype}
            found[num_experts] = each.attributes["experts"]
        elif each.kind == "linear" and ".shared_experts.down_proj." in each.weights["weight"].names[0]:
            found["moe_shared_expert_intermediate_size"] = each.weights["weight"].shape[1]
    return found


def _group_arguments(network: Network) -> Mapping[str, Any]:
    """Return the arguments about groups of experts, or none if a token may use all groups. Without latent attention,
    turn off the fused choice of experts, because MindFormers' GLM-4-MoE class has none.
    """
    is_fused = bool(latent_attentions(network))
    for each in network.operations:
        if each.kind == "route" and each.attributes["top_groups"] < each.attributes["groups"]:
            groups, top_groups = each.attributes["groups"], each.attributes["top_groups"]
            return {"n_group": groups, "topk_group": top_groups, "moe_router_fusion": is_fused}
    return {}
