"""The conventions of llama.cpp's converter for DeepSeek-V3, DeepSeek-V3.2, GLM-4.7-Flash and GLM-5.

`support.gguf_hybrids` writes the files. Each function follows the class of its architecture in `conversion/` of
llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from support.gguf_files import ROLES

Config = Mapping[str, Any]

_LATENT = {
    **ROLES,
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in ("q_a", "q_b")},
    **{f"self_attn.{part}_a_layernorm": f"attn_{part}_a_norm" for part in ("q", "kv")},
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    "enorm": "nextn.enorm",
}
_SPARSE = {
    **_LATENT,
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
}
LATENT_ROLES = {"deepseek2": _LATENT, "deepseek32": _SPARSE, "glm-dsa": _SPARSE}
"""Architecture -> name in the folder -> name in the file."""


def latent(name: str, array: np.ndarray, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    """Split kv_b_proj into keys, of which the matrix of each head is transposed, and values."""
    if name == "self_attn.kv_b_proj.weight":
        still = config["qk_nope_head_dim"]
        heads = array.reshape(config["num_attention_heads"], -1, array.shape[1])
        yield "attn_k_b.weight", heads[:, :still].swapaxes(1, 2)
        yield "attn_v_b.weight", heads[:, still:]
    elif name == "mlp.gate.e_score_correction_bias":
        yield "exp_probs_b.bias", array
    else:
        yield name, array


def latent_facts(config: Config) -> dict[str, Any]:
    rank, rotary, value = config["kv_lora_rank"], config["qk_rope_head_dim"], config["v_head_dim"]
    scoring = {} if config.get("scoring_func") is None else {"expert_gating_func": 2}
    predicting = config["num_nextn_predict_layers"]
    return {
        **scoring,
        **_yarn(config.get("rope_scaling")),
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotary,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": value,
        "block_count": config["num_hidden_layers"] + predicting,
        "nextn_predict_layers": predicting,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "rope.dimension_count": rotary,
        "rope.freq_base": float(config.get("rope_parameters", config)["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }


def sparse_facts(config: Config) -> dict[str, Any]:
    kinds = config.get("indexer_types")
    return {
        **latent_facts(config),
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk"],
        **({"attention.indexer.types": [each == "full" for each in kinds]} if kinds else {}),
    }


def _yarn(scaling: Config | None) -> dict[str, Any]:
    if scaling is None:
        return {}
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling["factor"]),
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": float(scaling["beta_fast"]),
        "rope.scaling.yarn_beta_slow": float(scaling["beta_slow"]),
        "rope.scaling.yarn_log_multiplier": 0.1 * scaling["mscale_all_dim"],
    }


LATENT_FACTS = {"deepseek2": latent_facts, "deepseek32": sparse_facts, "glm-dsa": sparse_facts}
"""Architecture -> its metadata."""
