"""Gemma: norm weights stored minus one; from the second on, norms on both sides, alternating windows, caps or norms of
heads.

The published configurations do not mention the tied LM head, and those of Gemma 2 not the kinds of layers.
"""

from __future__ import annotations

from typing import Any

from families.model import CROSSING, FAR, LONG, NEAR, PUBLISHED, SHORT, Model
from families.shapes import attention, decoder, mlp, norms

ALIKE: dict[str, Any] = {
    **PUBLISHED, "attention_bias": False, "head_dim": 24, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 72,
    "intermediate_size": 104, "max_position_embeddings": FAR, "num_attention_heads": 4, "num_hidden_layers": 4,
    "pad_token_id": 0, "query_pre_attn_scalar": 20, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "sliding_window": NEAR, "vocab_size": 200,
}  # fmt: skip
GEMMA: dict[str, Any] = {
    **{key: ALIKE[key] for key in ALIKE.keys() - {"hidden_activation", "query_pre_attn_scalar", "sliding_window"}},
    "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": "gelu_pytorch_tanh",
    "num_key_value_heads": 1,
}  # fmt: skip
GEMMA2: dict[str, Any] = {
    **ALIKE, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "attn_logit_softcapping": 3.0,
    "cache_implementation": "hybrid", "final_logit_softcapping": 6.0, "hidden_act": "gelu_pytorch_tanh",
    "num_key_value_heads": 2,
}  # fmt: skip
GEMMA3: dict[str, Any] = {
    **{key: value for key, value in ALIKE.items() if key != "hidden_act"}, "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text", "attn_logit_softcapping": None, "cache_implementation": "hybrid",
    "final_logit_softcapping": None, "num_key_value_heads": 1, "rope_local_base_freq": 10000, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window_pattern": 3,
}  # fmt: skip


def _gemma(config: dict[str, Any], *matters: dict[str, Any]) -> Model:
    head_norms = config["model_type"] == "gemma3_text"
    behind = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    placed = ("input_layernorm", "post_attention_layernorm", *(behind if config["model_type"] != "gemma" else ()))

    def layer(_: int) -> dict[str, tuple[int, ...]]:
        return attention(config, head_norms=head_norms) | mlp(config) | norms(config, *placed)

    shapes = decoder(config, layer, tied=True)
    return Model(config, shapes, lengths=(SHORT, CROSSING, LONG), matters=matters, norm_offset=1.0)


def models() -> dict[str, Model]:
    window = ({"sliding_window": 4 * FAR}, {"sliding_window": NEAR - 1})
    linear = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    return {
        "gemma": _gemma(GEMMA, {"rope_theta": 500000}, {"hidden_act": "silu"}),
        "gemma2": _gemma(
            GEMMA2,
            *window,
            {"attn_logit_softcapping": 50.0},
            {"final_logit_softcapping": 30.0},
            {"query_pre_attn_scalar": 24},
            {"hidden_activation": "silu"},
        ),
        "gemma3": _gemma(
            GEMMA3,
            *window,
            {"sliding_window_pattern": 2},
            {"rope_local_base_freq": 500000},
            {"rope_theta": 10000},
            {"query_pre_attn_scalar": 24},
        ),
        "gemma3-linear": _gemma(GEMMA3 | linear, {"rope_scaling": None}),
    }
