"""Granite (multipliers in four places), SmolLM3 (layers without rotary embedding), and other layers like Llama's."""

from __future__ import annotations

from typing import Any

from families.llama import LLAMA, llama_like
from families.model import CROSSING, LONG, NEAR, SHORT, Model
from families.shapes import attention, decoder, mlp, norms

GRANITE: dict[str, Any] = LLAMA | {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_multiplier": 0.12,
    "embedding_multiplier": 6.0, "logits_scaling": 1.5, "residual_multiplier": 0.6, "tie_word_embeddings": True,
}  # fmt: skip
SMOLLM3: dict[str, Any] = LLAMA | {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "layer_types": ["full_attention"] * 4,
    "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 0, 1], "num_hidden_layers": 4, "pad_token_id": 3,
    "rope_theta": 5000000.0, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
}  # fmt: skip
SEED_OSS: dict[str, Any] = LLAMA | {
    "architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "attention_bias": True,
    "attention_out_bias": False, "head_dim": 32, "residual_dropout": 0.1, "rope_scaling": {"rope_type": "default"},
    "rope_theta": 10000000.0,
}  # fmt: skip
ERNIE: dict[str, Any] = LLAMA | {
    "architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "head_dim": 32, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "use_bias": False,
}  # fmt: skip
HUNYUAN: dict[str, Any] = LLAMA | {
    "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "head_dim": 32,
    "rope_scaling": {"alpha": 50.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "type": "dynamic"},
    "tie_word_embeddings": True, "use_qk_norm": True,
}  # fmt: skip
MINISTRAL3: dict[str, Any] = {key: value for key, value in LLAMA.items() if "rope" not in key} | {
    "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "head_dim": 32, "sliding_window": None,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "llama_4_scaling_beta": 0.3, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": NEAR, "rope_theta": 1000000.0, "rope_type": "yarn",
    },
}  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm")
HUNYUAN_NORMS = ("query_layernorm", "key_layernorm")


def _biased(config: dict[str, Any], *matters: dict[str, Any], bias: bool, rest: bool, **facts: Any) -> Model:
    """Args: bias, rest: whether query, key and value, and the other products, have biases."""

    def layer(_: int) -> dict[str, tuple[int, ...]]:
        names = {"head_norms": True, "norm_names": HUNYUAN_NORMS} if "use_qk_norm" in config else {}
        attended = attention(config, bias=bias, out_bias=rest, **names)
        return attended | mlp(config, bias=rest) | norms(config, *NORMS)

    return Model(config, decoder(config, layer), matters=matters, **facts)


def models() -> dict[str, Model]:
    scaling, beyond = MINISTRAL3["rope_parameters"], (SHORT, CROSSING, LONG)
    return {
        "seed-oss": _biased(SEED_OSS, bias=True, rest=False),
        "ernie4.5": _biased(ERNIE, {"rope_theta": 10000.0}, bias=False, rest=False),
        "ernie4.5-biases": _biased(ERNIE | {"use_bias": True, "tie_word_embeddings": False}, bias=True, rest=True),
        "hunyuan": _biased(HUNYUAN, {"rope_scaling": HUNYUAN["rope_scaling"] | {"alpha": 2.0}}, bias=False, rest=False),
        "ministral3": _biased(
            MINISTRAL3,
            {"rope_parameters": scaling | {"llama_4_scaling_beta": 0.1}},
            {"rope_parameters": scaling | {"factor": 8.0}},
            bias=False,
            rest=False,
            lengths=beyond,
        ),
        "granite": llama_like(
            GRANITE,
            matters=(
                {"attention_multiplier": 0.25},
                {"embedding_multiplier": 1.0},
                {"logits_scaling": 1.0},
                {"residual_multiplier": 1.0},
            ),
        ),
        "granite-untied": llama_like(GRANITE | {"tie_word_embeddings": False, "attention_bias": True}),
        "smollm3": llama_like(SMOLLM3, matters=({"no_rope_layers": [1, 1, 1, 1]}, {"no_rope_layers": [0, 0, 1, 0]})),
    }
