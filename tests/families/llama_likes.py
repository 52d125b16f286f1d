"""Granite (multipliers in four places) and SmolLM3 (layers without rotary embedding)."""

from __future__ import annotations

from typing import Any

from families.llama import LLAMA, llama_like
from families.model import Model

GRANITE: dict[str, Any] = LLAMA | {
    "architectures": ["GraniteForCausalLM"], "model_type": "granite", "attention_multiplier": 0.12,
    "embedding_multiplier": 6.0, "logits_scaling": 1.5, "residual_multiplier": 0.6, "tie_word_embeddings": True,
}  # fmt: skip
SMOLLM3: dict[str, Any] = LLAMA | {
    "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "layer_types": ["full_attention"] * 4,
    "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 0, 1], "num_hidden_layers": 4, "pad_token_id": 3,
    "rope_theta": 5000000.0, "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
}  # fmt: skip


def models() -> dict[str, Model]:
    return {
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
