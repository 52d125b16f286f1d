"""DeepSeek and GLM models whose keys and values of a token are one latent vector; experts beside shared ones. In
DeepSeek-V3.2 and GLM-5, rows attend to selected keys only.
"""

from __future__ import annotations

from typing import Any

from families.model import CROSSING, FAR, LONG, NEAR, PUBLISHED, SHORT, Model
from families.shapes import Shapes, decoder, experts, linear, mlp, norms

V2: dict[str, Any] = {
    **PUBLISHED, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": False,
    "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 1, "hidden_size": 64, "intermediate_size": 104,
    "kv_lora_rank": 24, "max_position_embeddings": FAR, "moe_intermediate_size": 40, "moe_layer_freq": 1, "n_group": 4,
    "n_routed_experts": 8, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 4,
    "num_experts_per_tok": 3, "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 40,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 4, "mscale": 0.9, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": NEAR, "type": "yarn",
    },
    "routed_scaling_factor": 2.5, "scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False,
    "topk_group": 2, "topk_method": "group_limited_greedy", "v_head_dim": 12, "vocab_size": 200,
}  # fmt: skip
LITE: dict[str, Any] = V2 | {
    "n_group": 1, "q_lora_rank": None, "rope_scaling": V2["rope_scaling"] | {"mscale": 0.707},
    "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy",
}  # fmt: skip
V3: dict[str, Any] = {key: value for key, value in V2.items() if key not in ("aux_loss_alpha", "seq_aux")} | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "norm_topk_prob": True,
    "num_nextn_predict_layers": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip
KIMI_K2 = V3 | {
    "first_k_dense_replace": 2, "n_group": 1, "num_nextn_predict_layers": 0, "rope_scaling": None, "topk_group": 1,
}  # fmt: skip
WIDE = V3 | {
    "kv_lora_rank": 512, "n_routed_experts": 16, "num_attention_heads": 2, "num_experts_per_tok": 4,
    "num_hidden_layers": 2, "num_key_value_heads": 2, "num_nextn_predict_layers": 0, "qk_rope_head_dim": 64,
    "v_head_dim": 16,
}  # fmt: skip
"""Latent vectors and rotary keys as wide as published, which MindFormers' class requires."""
V32 = V3 | {
    "architectures": ["DeepseekV32ForCausalLM"], "index_head_dim": 32, "index_n_heads": 12, "index_topk": 24,
    "model_type": "deepseek_v32", "topk_group": 2,
}  # fmt: skip
FLASH: dict[str, Any] = {
    **PUBLISHED, "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "attention_bias": False,
    "first_k_dense_replace": 1, "hidden_size": 64, "intermediate_size": 104, "kv_lora_rank": 24,
    "max_position_embeddings": FAR, "mlp_layer_types": ["dense", "sparse", "sparse"], "moe_intermediate_size": 40,
    "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 4,
    "num_experts_per_tok": 3, "num_hidden_layers": 3, "num_key_value_heads": 4, "num_nextn_predict_layers": 1,
    "q_lora_rank": 40, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 32, "vocab_size": 200,
}  # fmt: skip
GLM_5 = FLASH | {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "index_head_dim": 16, "index_n_heads": 12,
    "index_topk": 20, "indexer_types": ["full", "shared", "full"], "routed_scaling_factor": 2.5,
}  # fmt: skip


def _indexer(c: dict[str, Any]) -> Shapes:
    size = c["index_head_dim"]
    shapes = linear("self_attn.indexer.wq_b", c["index_n_heads"] * size, c["q_lora_rank"])
    shapes |= linear("self_attn.indexer.wk", size, c["hidden_size"])
    shapes |= {f"self_attn.indexer.k_norm.{name}": (size,) for name in ("weight", "bias")}
    return shapes | linear("self_attn.indexer.weights_proj", c["index_n_heads"], c["hidden_size"])


def latent_attention(c: dict[str, Any]) -> Shapes:
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    q_rows = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    if c["q_lora_rank"]:
        shapes = linear("self_attn.q_a_proj", c["q_lora_rank"], hidden)
        shapes |= {"self_attn.q_a_layernorm.weight": (c["q_lora_rank"],)}
        shapes |= linear("self_attn.q_b_proj", q_rows, c["q_lora_rank"])
    else:
        shapes = linear("self_attn.q_proj", q_rows, hidden)
    return (
        shapes
        | linear("self_attn.kv_a_proj_with_mqa", rank + c["qk_rope_head_dim"], hidden)
        | {"self_attn.kv_a_layernorm.weight": (rank,)}
        | linear("self_attn.kv_b_proj", heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank)
        | linear("self_attn.o_proj", hidden, heads * c["v_head_dim"])
    )


def _deepseek(config: dict[str, Any], *matters: dict[str, Any]) -> Model:
    third = config["model_type"] != "deepseek_v2"
    indexers = config.get("indexer_types", ["full" if "index_topk" in config else ""] * config["num_hidden_layers"])

    def layer(index: int) -> Shapes:
        if index < config["first_k_dense_replace"]:
            feed_forward = mlp(config)
        else:
            inner = config["moe_intermediate_size"]
            feed_forward = experts(config, config["n_routed_experts"], inner)
            feed_forward |= mlp(config, inner * config["n_shared_experts"], at="mlp.shared_experts.")
            if third:
                feed_forward["mlp.gate.e_score_correction_bias"] = (config["n_routed_experts"],)
        indexer = _indexer(config) if indexers[index] == "full" else {}
        return (
            latent_attention(config)
            | indexer
            | feed_forward
            | norms(config, "input_layernorm", "post_attention_layernorm")
        )

    scaling, shapes = config.get("rope_scaling"), decoder(config, layer)
    if scaling:
        matters += ({"rope_scaling": None}, {"rope_scaling": scaling | {"mscale_all_dim": 0.5}})
    for number in range(config.get("num_nextn_predict_layers", 0)):
        shapes |= norms(config, f"model.layers.{config['num_hidden_layers'] + number}.enorm")
    return Model(
        config, shapes, lengths=(SHORT, CROSSING, LONG),
        matters=({"num_experts_per_tok": 2}, {"routed_scaling_factor": 1.7}, *matters),
    )  # fmt: skip


def models() -> dict[str, Model]:
    return {
        "deepseek-v2": _deepseek(V2, {"topk_method": "greedy"}, {"topk_group": 3}),
        "deepseek-v2-lite": _deepseek(LITE),
        "deepseek-v3": _deepseek(V3, {"topk_group": 3}, {"norm_topk_prob": False}),
        "deepseek-v3-wide": _deepseek(WIDE, {"topk_group": 3}),
        "kimi-k2": _deepseek(KIMI_K2),
        "deepseek-v3.2": _deepseek(V32, {"index_topk": 40}),
        "glm-4.7-flash": _deepseek(FLASH, {"norm_topk_prob": False}),
        "glm-5": _deepseek(GLM_5, {"index_topk": 40}),
    }
