"""GLM-4: half of each head rotates, in adjacent pairs. GLM-4-0414 also has norms behind each sublayer."""

from __future__ import annotations

from typing import Any

from families.model import FAR, PUBLISHED, Model
from families.shapes import attention, decoder, mlp, norms

GLM: dict[str, Any] = {
    **PUBLISHED, "architectures": ["GlmForCausalLM"], "model_type": "glm", "attention_bias": True, "head_dim": 32,
    "hidden_size": 80, "intermediate_size": 104, "max_position_embeddings": FAR, "num_attention_heads": 4,
    "num_hidden_layers": 3, "num_key_value_heads": 2, "pad_token_id": 3, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 200,
}  # fmt: skip
GLM4 = GLM | {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": False}


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


def models() -> dict[str, Model]:
    behind = ("post_self_attn_layernorm", "post_mlp_layernorm")
    return {
        "glm": _glm(GLM),
        "glm4": _glm(GLM4, *behind),
        "glm4-biases": _glm(GLM4 | {"attention_bias": True, "head_dim": 24}, *behind),
    }
