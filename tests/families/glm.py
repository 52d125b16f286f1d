"""GLM-4: half of each head rotates, in adjacent pairs. GLM-4-0414 also has norms behind each sublayer; GLM-4.5
has experts.
"""

from __future__ import annotations

from typing import Any

from families.model import FAR, PUBLISHED, Model
from families.shapes import attention, decoder, experts, mlp, norms

GLM: dict[str, Any] = {
    **PUBLISHED, "architectures": ["GlmForCausalLM"], "model_type": "glm", "attention_bias": True, "head_dim": 32,
    "hidden_size": 80, "intermediate_size": 104, "max_position_embeddings": FAR, "num_attention_heads": 4,
    "num_hidden_layers": 3, "num_key_value_heads": 2, "pad_token_id": 3, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 200,
}  # fmt: skip
GLM4 = GLM | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": False}
GLM4_MOE: dict[str, Any] = {
    **PUBLISHED, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True,
    "first_k_dense_replace": 1, "head_dim": 32, "hidden_size": 64, "intermediate_size": 104,
    "max_position_embeddings": FAR, "moe_intermediate_size": 40, "n_group": 1, "n_routed_experts": 8,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 4, "num_experts_per_tok": 3,
    "num_hidden_layers": 3, "num_key_value_heads": 2, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5, "rope_theta": 1000000, "routed_scaling_factor": 1.5, "tie_word_embeddings": False,
    "topk_group": 1, "use_qk_norm": True, "vocab_size": 200,
}  # fmt: skip


def _glm(config: dict[str, Any], *behind: str) -> Model:
    def layer(_: int) -> dict[str, tuple[int, ...]]:
        return (
            attention(config, bias=config["attention_bias"])
            | mlp(config, joined="gate_up_proj")
            | norms(config, "input_layernorm", "post_attention_layernorm", *behind)
        )

    matters = ({"partial_rotary_factor": 1.0}, {"rope_theta": 500000.0}, {"rms_norm_eps": 0.05})
    ends = {"eos_token_id": [2, 4, 5]}
    return Model(config | ends, decoder(config, layer), matters=matters, generation={"do_sample": True, **ends})


def _glm4_moe(config: dict[str, Any], *matters: dict[str, Any]) -> Model:
    def layer(index: int) -> dict[str, tuple[int, ...]]:
        feed_forward, inner = mlp(config), config["moe_intermediate_size"]
        if index >= config["first_k_dense_replace"]:
            feed_forward = experts(config, config["n_routed_experts"], inner)
            feed_forward |= mlp(config, inner * config["n_shared_experts"], at="mlp.shared_experts.")
            feed_forward["mlp.gate.e_score_correction_bias"] = (config["n_routed_experts"],)
        attended = attention(config, bias=config["attention_bias"], head_norms=config["use_qk_norm"])
        return attended | feed_forward | norms(config, "input_layernorm", "post_attention_layernorm")

    return Model(config, decoder(config, layer), matters=matters)


def models() -> dict[str, Model]:
    behind = ("post_self_attn_layernorm", "post_mlp_layernorm")
    return {
        "glm": _glm(GLM),
        "glm4": _glm(GLM4, *behind),
        "glm4-moe": _glm4_moe(GLM4_MOE, {"routed_scaling_factor": 1.0}, {"num_experts_per_tok": 2}),
        "glm4-moe-groups": _glm4_moe(
            GLM4_MOE
            | {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "use_qk_norm": False, "attention_bias": False},
            {"topk_group": 3},
            {"norm_topk_prob": True},
        ),
        "glm4-biases": _glm(GLM4 | {"attention_bias": True, "head_dim": 24}, *behind),
    }
