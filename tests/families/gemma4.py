"""Gemma 3n and Gemma 4: token embeddings for each layer, layers that share keys and values; residual streams and sparse
activations in the former, heads of two sizes and experts in the latter.
"""

from __future__ import annotations

from typing import Any

from families.gemma import ALIKE
from families.model import CROSSING, FAR, LONG, NEAR, SHORT, Model
from families.shapes import Shapes, attention, decoder, linear, mlp, norms

GEMMA3N: dict[str, Any] = {
    key: value for key, value in ALIKE.items() if key not in ("hidden_act", "query_pre_attn_scalar")
}
GEMMA3N |= {
    "activation_sparsity_pattern": [0.8, 0.0, 0.5, 0.0, 0.0], "altup_active_idx": 1, "altup_coef_clip": 120.0,
    "altup_correct_scale": True, "altup_num_inputs": 3, "architectures": ["Gemma3nForCausalLM"],
    "final_logit_softcapping": 8.0, "hidden_size": 64, "hidden_size_per_layer_input": 16,
    "intermediate_size": [104, 96, 104, 104, 96], "laurel_rank": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"], "model_type": "gemma3n_text",
    "num_hidden_layers": 5, "num_key_value_heads": 2, "num_kv_shared_layers": 2, "rope_local_base_freq": 10000.0,
    "rope_scaling": None, "rope_theta": 1000000.0, "vocab_size_per_layer_input": 190,
}  # fmt: skip
GEMMA4: dict[str, Any] = {key: value for key, value in ALIKE.items() if "rope" not in key and "query" not in key}
GEMMA4 |= {
    "architectures": ["Gemma4ForCausalLM"], "attention_k_eq_v": False, "enable_moe_block": False,
    "final_logit_softcapping": 8.0, "global_head_dim": 56, "hidden_size": 64, "hidden_size_per_layer_input": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "model_type": "gemma4_text", "num_key_value_heads": 2,
    "num_kv_shared_layers": 2, "use_bidirectional_attention": None, "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": 200,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}  # fmt: skip
MOE: dict[str, Any] = GEMMA4 | {
    "attention_k_eq_v": True, "enable_moe_block": True, "final_logit_softcapping": None, "global_head_dim": 28,
    "hidden_size_per_layer_input": 0, "moe_intermediate_size": 40, "num_experts": 6, "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 0, "top_k_experts": 2, "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}  # fmt: skip
"""In both, layers of one kind need half the memory of the other kind for a token, as in the published models."""
NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _attention(config: dict[str, Any], index: int) -> Shapes:
    first = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    shapes = attention(config, head_norms=True)
    without = ("k_proj", "v_proj", "k_norm") if index >= first else ("v_proj",) if config.get("equal") else ()
    return {name: shape for name, shape in shapes.items() if name.split(".")[1] not in without}


def _layer_input(config: dict[str, Any]) -> Shapes:
    hidden, width = config["hidden_size"], config["hidden_size_per_layer_input"]
    shapes = linear("per_layer_input_gate", width, hidden) | linear("per_layer_projection", hidden, width)
    return shapes | norms(config, "post_per_layer_input_norm")


def _tables(config: dict[str, Any]) -> Shapes:
    width = config["hidden_size_per_layer_input"]
    whole = config["num_hidden_layers"] * width
    return {
        "model.embed_tokens_per_layer.weight": (config["vocab_size_per_layer_input"], whole),
        "model.per_layer_model_projection.weight": (whole, config["hidden_size"]),
        "model.per_layer_projection_norm.weight": (width,),
    }


def _gemma3n(changes: dict[str, Any], *matters: dict[str, Any]) -> Model:
    config = GEMMA3N | changes
    hidden, count, rank = config["hidden_size"], config["altup_num_inputs"], config["laurel_rank"]

    def layer(index: int) -> Shapes:
        shapes = _attention(config, index) | _layer_input(config) | norms(config, *NORMS, "laurel.post_laurel_norm")
        shapes |= mlp(config, config["intermediate_size"][index]) | norms(config, "altup.router_norm")
        shapes |= linear("laurel.linear_left", rank, hidden) | linear("laurel.linear_right", hidden, rank)
        shapes |= linear("altup.modality_router", count, hidden) | linear("altup.prediction_coefs", count**2, count)
        return shapes | linear("altup.correction_coefs", count, count) | {"altup.correct_output_scale": (hidden,)}

    shapes = decoder(config, layer, tied=True) | _tables(config)
    for index in range(count - 1):
        for part in ("altup_projections", "altup_unembed_projections"):
            shapes |= linear(f"model.{part}.{index}", hidden, hidden)
    return Model(config, shapes, lengths=(SHORT, CROSSING, LONG), matters=matters, head_norm=0.7)


def _gemma4(config: dict[str, Any], *matters: dict[str, Any]) -> Model:
    first, hidden = config["num_hidden_layers"] - config["num_kv_shared_layers"], config["hidden_size"]

    def experts() -> Shapes:
        count, inner = config["num_experts"], config["moe_intermediate_size"]
        shapes: Shapes = {
            "experts.gate_up_proj": (count, 2 * inner, hidden),
            "experts.down_proj": (count, hidden, inner),
        }
        shapes |= linear("router.proj", count, hidden) | {
            "router.scale": (hidden,),
            "router.per_expert_scale": (count,),
        }
        behind = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
        return shapes | norms(config, *behind)

    def layer(index: int) -> Shapes:
        heads = dict(config)
        if config["layer_types"][index] == "full_attention":
            heads |= {"head_dim": config["global_head_dim"], "equal": config["attention_k_eq_v"]}
            if config["attention_k_eq_v"]:
                heads["num_key_value_heads"] = config["num_global_key_value_heads"]
        twice = 1 + (config["use_double_wide_mlp"] and index >= first)
        shapes = _attention(heads, index) | mlp(config, config["intermediate_size"] * twice) | norms(config, *NORMS)
        shapes |= _layer_input(config) if config["hidden_size_per_layer_input"] else {}
        return shapes | (experts() if config["enable_moe_block"] else {}) | {"layer_scalar": (1,)}

    shapes = decoder(config, layer, tied=True)
    shapes |= _tables(config) if config["hidden_size_per_layer_input"] else {}
    return Model(config, shapes, lengths=(SHORT, CROSSING, LONG), matters=matters, head_norm=0.7)


def models() -> dict[str, Model]:
    window = ({"sliding_window": 4 * FAR}, {"sliding_window": NEAR - 1})
    ropes = GEMMA4["rope_parameters"]
    full = ropes["full_attention"] | {"partial_rotary_factor": 1.0}
    return {
        "gemma3n": _gemma3n(
            {},
            *window,
            {"activation_sparsity_pattern": [0.0] * 5},
            {"altup_active_idx": 0},
            {"altup_correct_scale": False},
            {"final_logit_softcapping": 30.0},
            {"rope_local_base_freq": 1000.0},
            {"rope_theta": 10000.0},
        ),
        "gemma4": _gemma4(
            GEMMA4, *window, {"final_logit_softcapping": None}, {"rope_parameters": ropes | {"full_attention": full}}
        ),
        "gemma4-moe": _gemma4(MOE, *window, {"top_k_experts": 1}),
    }
