"""MiniCPM 3: latent attention as in DeepSeek-V2, and factors for embeddings, residuals and logits."""

from __future__ import annotations

from typing import Any

from families.deepseek import latent_attention
from families.model import FAR, LONG, NEAR, PUBLISHED, SHORT, Model
from families.shapes import Shapes, decoder, mlp, norms

MINICPM3: dict[str, Any] = {
    **PUBLISHED, "architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "attention_bias": False,
    "dim_model_base": 48, "hidden_size": 64, "intermediate_size": 104, "kv_lora_rank": 24,
    "max_position_embeddings": FAR, "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 4,
    "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "rms_norm_eps": 1e-5,
    "rope_scaling": {"long_factor": [1.0, 1.5, 3.0, 4.0], "original_max_position_embeddings": NEAR,
                     "short_factor": [1.0, 1.0, 1.2, 1.5], "type": "longrope"},
    "rope_theta": 10000.0, "scale_depth": 1.4, "scale_emb": 6, "tie_word_embeddings": True, "vocab_size": 200,
}  # fmt: skip


def _minicpm3(changes: dict[str, Any], *matters: dict[str, Any], **facts: Any) -> Model:
    config = MINICPM3 | changes
    of_values = config | {"v_head_dim": config["hidden_size"] // config["num_attention_heads"]} | changes

    def layer(_: int) -> Shapes:
        rest = mlp(config, bias=config.get("mlp_bias", False))
        return latent_attention(of_values) | rest | norms(config, "input_layernorm", "post_attention_layernorm")

    return Model(config, decoder(config, layer), lengths=(SHORT, LONG), matters=matters, **facts)


def models() -> dict[str, Model]:
    plain = {
        "mlp_bias": True,
        "q_lora_rank": None,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "v_head_dim": 12,
    }
    return {
        "minicpm3": _minicpm3(
            {},
            {"scale_depth": 1.0},
            {"scale_emb": 12},
            {"dim_model_base": 64},
            {"rope_scaling": None},
            served_length=FAR,
        ),
        "minicpm3-plain": _minicpm3(plain, {"rope_theta": 1000.0}, {"dim_model_base": None}),
    }
