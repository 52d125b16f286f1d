"""Llama 2 and 3 with every RoPE scaling, and Mistral."""

from __future__ import annotations

from typing import Any

from families.model import CROSSING, FAR, LONG, NEAR, PUBLISHED, SHORT, Model
from families.shapes import attention, decoder, mlp, norms

STRETCHED = (SHORT, CROSSING, LONG)
LLAMA: dict[str, Any] = {
    **PUBLISHED, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
    "hidden_size": 64, "intermediate_size": 112, "max_position_embeddings": FAR, "mlp_bias": False,
    "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2, "pretraining_tp": 1,
    "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 200,
}  # fmt: skip
LLAMA_3_ROPE = {
    "factor": 4.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": NEAR,
    "rope_type": "llama3",
}  # fmt: skip
LONG_FACTORS = [1.0, 1.1, 1.3, 1.7, 2.2, 2.9, 3.6, 4.4]
SHORT_FACTORS = [1.0, 1.0, 1.05, 1.1, 1.15, 1.25, 1.35, 1.5]
MISTRAL: dict[str, Any] = {
    **PUBLISHED, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 64,
    "intermediate_size": 96, "max_position_embeddings": FAR, "num_attention_heads": 4, "num_hidden_layers": 3,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": NEAR,
    "tie_word_embeddings": False, "vocab_size": 200,
}  # fmt: skip


def llama_like(config: dict[str, Any], **facts: Any) -> Model:
    bias = config.get("attention_bias", False)

    def layer(_: int) -> dict[str, tuple[int, ...]]:
        return (
            attention(config, bias=bias, out_bias=bias)
            | mlp(config, bias=config.get("mlp_bias", False))
            | norms(config, "input_layernorm", "post_attention_layernorm")
        )

    return Model(config, decoder(config, layer), **facts)


def _stretched(scaling: dict[str, Any], *matters: dict[str, Any], **facts: Any) -> Model:
    changed = {key: facts.pop(key) for key in ("max_position_embeddings", "head_dim") if key in facts}
    without = {"rope_scaling": None}
    return llama_like(
        LLAMA | {"rope_scaling": scaling} | changed, lengths=STRETCHED, matters=(without, *matters), **facts
    )


def models() -> dict[str, Model]:
    return {
        "llama2": llama_like(
            {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "attention_bias", "mlp_bias")}
            | {"num_key_value_heads": 4},
            matters=({"rms_norm_eps": 0.05}, {"rope_theta": 500000.0}),
        ),
        "llama3": llama_like(
            LLAMA | {"hidden_size": 96, "rope_theta": 500000.0, "eos_token_id": [2, 3], "vocab_size": 203},
            matters=({"rope_theta": None},),
            generation={"bos_token_id": 1, "do_sample": True, "eos_token_id": [2, 3], "temperature": 0.6, "top_p": 0.9},
        ),
        "llama3.1": _stretched(
            LLAMA_3_ROPE,
            {"rope_scaling": LLAMA_3_ROPE | {"low_freq_factor": 2.0}},
            {"rope_scaling": LLAMA_3_ROPE | {"original_max_position_embeddings": FAR}},
        ),
        "llama3.2": llama_like(
            LLAMA | {"head_dim": 32, "rope_scaling": LLAMA_3_ROPE, "rope_theta": 500000.0, "tie_word_embeddings": True},
            lengths=STRETCHED,
            matters=({"rope_scaling": None},),
        ),
        "llama-linear": _stretched({"type": "linear", "factor": 4.0}, max_position_embeddings=NEAR),
        "llama-dynamic": _stretched(
            {"type": "dynamic", "factor": 4.0}, max_position_embeddings=NEAR, served_length=FAR
        ),
        "llama-yarn": _stretched(
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": NEAR},
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            head_dim=24,
        ),
        "llama-yarn-told": _stretched(
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": NEAR,
                "beta_fast": 8.0,
                "beta_slow": 0.5,
                "attention_factor": 1.3,
            },
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": NEAR}},
        ),
        "llama-longrope": _stretched(
            {
                "rope_type": "longrope",
                "long_factor": LONG_FACTORS,
                "short_factor": SHORT_FACTORS,
                "original_max_position_embeddings": NEAR,
            },
            served_length=FAR,
        ),
        "llama-biases": llama_like(LLAMA | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
        "mistral": llama_like(MISTRAL, lengths=STRETCHED, matters=({"sliding_window": None}, {"sliding_window": 63})),
        "mistral-nemo": llama_like(MISTRAL | {"head_dim": 40, "rope_theta": 1e6, "sliding_window": None}),
    }
