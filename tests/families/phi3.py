"""Phi-3 and Phi-4: fused query, key and value, fused gate and up, windows, longrope, partial rotary embedding."""

from __future__ import annotations

from typing import Any

from families.model import CROSSING, FAR, LONG, NEAR, PUBLISHED, SHORT, Model
from families.shapes import Shapes, attention, decoder, experts, mlp, norms

PHI3: dict[str, Any] = {
    **PUBLISHED, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0,
    "hidden_size": 96, "intermediate_size": 112, "max_position_embeddings": FAR, "num_attention_heads": 4,
    "num_hidden_layers": 3, "num_key_value_heads": 4, "original_max_position_embeddings": FAR, "pad_token_id": 0,
    "resid_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": NEAR,
    "tie_word_embeddings": False, "vocab_size": 200,
}  # fmt: skip
LONG_FACTORS = [1.0, 1.02, 1.1, 1.25, 1.45, 1.7, 2.0, 2.4, 2.8, 3.3, 3.8, 4.5]
SHORT_FACTORS = [1.0, 1.0, 1.0, 1.02, 1.05, 1.08, 1.12, 1.18, 1.25, 1.35, 1.5, 1.7]
STRETCHED: dict[str, Any] = {
    "original_max_position_embeddings": NEAR, "sliding_window": 4 * FAR,
    "rope_scaling": {"long_factor": LONG_FACTORS, "short_factor": SHORT_FACTORS, "type": "longrope"},
}  # fmt: skip
PARTLY: dict[str, Any] = {
    "num_key_value_heads": 2, "partial_rotary_factor": 0.75, "tie_word_embeddings": True,
    "rope_scaling": {"long_factor": LONG_FACTORS[3:], "short_factor": SHORT_FACTORS[3:], "type": "longrope"},
}  # fmt: skip
PHIMOE: dict[str, Any] = PHI3 | {
    "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe", "attention_bias": True, "intermediate_size": 56,
    "lm_head_bias": True, "num_experts_per_tok": 2, "num_key_value_heads": 2, "num_local_experts": 6,
    "original_max_position_embeddings": NEAR, "router_jitter_noise": 0.25,
    "rope_scaling": {"long_factor": LONG_FACTORS, "long_mscale": 1.2, "original_max_position_embeddings": NEAR,
                     "short_factor": LONG_FACTORS, "short_mscale": 1.2, "type": "longrope"},
    "sliding_window": 4 * FAR,
}  # fmt: skip
"""`transformers` 5.24 takes the short factors for every length, so both lists are equal."""


def _phi3(changes: dict[str, Any], *matters: dict[str, Any], **facts: Any) -> Model:
    config = PHI3 | changes

    def layer(_: int) -> dict[str, tuple[int, ...]]:
        return (
            attention(config, joined="qkv_proj")
            | mlp(config, joined="gate_up_proj")
            | norms(config, "input_layernorm", "post_attention_layernorm")
        )

    return Model(config, decoder(config, layer), matters=matters, **facts)


def _phimoe(changes: dict[str, Any], *matters: dict[str, Any], **facts: Any) -> Model:
    config = PHIMOE | changes
    names = [
        f"{each}.{kind}" for each in ("input_layernorm", "post_attention_layernorm") for kind in ("weight", "bias")
    ]

    def layer(_: int) -> Shapes:
        bias = config["attention_bias"]
        routed = experts(
            config,
            config["num_local_experts"],
            config["intermediate_size"],
            at="block_sparse_moe.",
            names=("w1", "w3", "w2"),
        )
        return attention(config, bias=bias, out_bias=bias) | routed | dict.fromkeys(names, (config["hidden_size"],))

    shapes = decoder(config, layer) | {"model.norm.bias": (config["hidden_size"],)}
    if config["lm_head_bias"]:
        shapes["lm_head.bias"] = (config["vocab_size"],)
    return Model(config, shapes, matters=matters, **facts)


def models() -> dict[str, Model]:
    beyond = (SHORT, CROSSING, LONG)
    without: dict[str, Any] = {"rope_scaling": None}
    return {
        "phi3": _phi3({}, {"sliding_window": 4 * FAR}, {"sliding_window": NEAR - 1}, lengths=beyond),
        "phi3-longrope": _phi3(STRETCHED, without, lengths=beyond, served_length=FAR),
        "phi3-longrope-within": _phi3(STRETCHED, without, lengths=(SHORT, NEAR - 24), served_length=NEAR),
        "phi4": _phi3({"num_key_value_heads": 2, "sliding_window": None}, {"rope_theta": 250000.0}),
        "phi4-mini": _phi3(
            STRETCHED | PARTLY, without, {"partial_rotary_factor": None} | without, lengths=beyond, served_length=FAR
        ),
        "phimoe": _phimoe(
            {},
            without,
            {"router_jitter_noise": 0.05},
            {"rope_scaling": PHIMOE["rope_scaling"] | {"long_mscale": 1.0, "short_mscale": 1.0}},
            lengths=beyond,
            bias_spread=0.2,
        ),
        "phimoe-plain": _phimoe(
            without | {"attention_bias": False, "lm_head_bias": False, "sliding_window": NEAR},
            {"rope_theta": 500.0},
            lengths=beyond,
        ),
    }
