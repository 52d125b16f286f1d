"""Llama 4: attention within chunks, layers without rotary embedding, expert inputs times the routing weight."""

from __future__ import annotations

from typing import Any

from families.llama import LLAMA
from families.model import CROSSING, LONG, NEAR, SHORT, Model
from families.shapes import Shapes, attention, decoder, linear, mlp, norms

LLAMA4: dict[str, Any] = LLAMA | {
    "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "attention_bias": False,
    "attention_chunk_size": 48, "attn_scale": 0.3, "attn_temperature_tuning": True, "floor_scale": 32, "head_dim": 24,
    "hidden_size": 96, "interleave_moe_layer_step": 1, "intermediate_size": 56, "intermediate_size_mlp": 120,
    "moe_layers": [0, 1, 2, 3], "no_rope_layers": [1, 0, 1, 1], "num_attention_heads": 4, "num_experts_per_tok": 1,
    "num_hidden_layers": 4, "num_key_value_heads": 2, "num_local_experts": 4, "rms_norm_eps": 1e-5,
    "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": NEAR, "rope_type": "llama3"},
    "rope_theta": 500000.0, "use_qk_norm": True,
}  # fmt: skip


def _llama4(changes: dict[str, Any], *matters: dict[str, Any]) -> Model:
    config = LLAMA4 | changes
    count, inner, hidden = config["num_local_experts"], config["intermediate_size"], config["hidden_size"]

    def feed_forward(index: int) -> Shapes:
        if index not in config["moe_layers"]:
            return mlp(config, config["intermediate_size_mlp"], at="feed_forward.")
        routed: Shapes = {"feed_forward.experts.gate_up_proj": (count, hidden, 2 * inner)}
        routed["feed_forward.experts.down_proj"] = (count, inner, hidden)
        shared = mlp(config, inner, at="feed_forward.shared_expert.")
        return routed | linear("feed_forward.router", count, hidden) | shared

    def layer(index: int) -> Shapes:
        bias = config["attention_bias"]
        rest = feed_forward(index) | norms(config, "input_layernorm", "post_attention_layernorm")
        return attention(config, bias=bias, out_bias=bias) | rest

    return Model(config, decoder(config, layer), lengths=(SHORT, CROSSING, LONG), matters=matters)


def models() -> dict[str, Model]:
    return {
        "llama4": _llama4(
            {},
            {"attention_chunk_size": None},
            {"attn_scale": 0.1},
            {"attn_temperature_tuning": False},
            {"floor_scale": 64},
            {"no_rope_layers": [1, 1, 1, 1]},
            {"use_qk_norm": False},
            {"rope_scaling": None},
        ),
        "llama4-dense": _llama4(
            {
                "attention_bias": True,
                "attn_temperature_tuning": False,
                "moe_layers": [1, 3],
                "no_rope_layers": [1, 1, 1, 1],
                "num_experts_per_tok": 2,
                "use_qk_norm": False,
            },
            {"num_experts_per_tok": 1},
            {"no_rope_layers": [1, 0, 1, 1]},
        ),
    }
