"""Granite 4, Nemotron-H and Falcon-H1: Mamba-2 mixed with attention layers, or parallel to attention in each layer."""

from __future__ import annotations

from typing import Any

from families.llama import LLAMA
from families.llama_likes import GRANITE
from families.model import NEAR, PUBLISHED, Model
from families.shapes import Shapes, attention, decoder, linear, mlp, norms

HYBRID: dict[str, Any] = GRANITE | {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 64,
    "intermediate_size": 40, "layer_types": ["mamba", "attention", "mamba"], "mamba_chunk_size": 16, "mamba_d_conv": 4,
    "mamba_conv_bias": True, "mamba_d_head": 32, "mamba_d_state": 24, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_n_heads": 4, "mamba_proj_bias": False, "num_attention_heads": 4, "num_experts_per_tok": 3,
    "num_hidden_layers": 3, "num_key_value_heads": 2, "num_local_experts": 8, "position_embedding_type": "nope",
    "shared_intermediate_size": 56,
}  # fmt: skip


NEMOTRON: dict[str, Any] = PUBLISHED | {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "attention_bias": False, "head_dim": 24,
    "hidden_size": 64, "hybrid_override_pattern": "M-*M-", "intermediate_size": 104, "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 20, "mamba_hidden_act": "silu", "mamba_num_heads": 6, "mamba_proj_bias": False,
    "max_position_embeddings": 4 * NEAR, "mlp_bias": False, "mlp_hidden_act": "relu2", "n_groups": 2,
    "num_attention_heads": 4, "num_hidden_layers": 5, "num_key_value_heads": 2, "ssm_state_size": 16,
    "conv_kernel": 4, "tie_word_embeddings": False, "time_step_limit": [0.0, 1e9], "time_step_min": 0.001,
    "use_bias": False, "use_conv_bias": True, "vocab_size": 200,
}  # fmt: skip


FALCON: dict[str, Any] = LLAMA | {
    "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "attention_in_multiplier": 0.8, "head_dim": 24,
    "attention_out_multiplier": 0.7, "embedding_multiplier": 3.0, "hidden_size": 64, "intermediate_size": 104,
    "key_multiplier": 0.9, "lm_head_multiplier": 0.6, "mamba_chunk_size": 16, "mamba_conv_bias": True,
    "mamba_d_conv": 4, "mamba_d_head": 20, "mamba_d_ssm": 80, "mamba_d_state": 24, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_n_heads": 4, "mamba_norm_before_gate": False, "mamba_proj_bias": False,
    "mamba_rms_norm": False, "mlp_bias": False, "mlp_multipliers": [0.7, 0.8], "num_attention_heads": 4,
    "num_key_value_heads": 2, "projectors_bias": False, "rms_norm_eps": 1e-5, "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 1.3, "ssm_multipliers": [0.7, 0.9, 1.2, 0.8, 1.1], "ssm_out_multiplier": 0.6,
}  # fmt: skip


NEMOTRON3: dict[str, Any] = {
    "hybrid_override_pattern": "ME*EM-", "moe_intermediate_size": 40, "moe_latent_size": None,
    "moe_shared_expert_intermediate_size": 56, "n_group": 4, "n_routed_experts": 8, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_experts_per_tok": 3, "num_hidden_layers": 6, "routed_scaling_factor": 1.5,
    "topk_group": 2,
}  # fmt: skip


def _granite_mixer(config: dict[str, Any]) -> Shapes:
    inner, shared = config["mamba_expand"] * config["hidden_size"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = config["hidden_size"], config["mamba_n_heads"], inner, shared, config["mamba_d_conv"]
    return _mixer("mamba.", *sizes, config["mamba_proj_bias"], config["mamba_conv_bias"])


def _mixer(at: str, hidden: int, heads: int, inner: int, shared: int, taps: int, bias: bool, conv_bias: bool) -> Shapes:
    mixed = inner + 2 * shared
    shapes: Shapes = {f"{at}{name}": (heads,) for name in ("A_log", "D", "dt_bias")}
    shapes |= {f"{at}conv1d.weight": (mixed, 1, taps), f"{at}norm.weight": (inner,)}
    if conv_bias:
        shapes[f"{at}conv1d.bias"] = (mixed,)
    return (
        shapes
        | linear(f"{at}in_proj", inner + mixed + heads, hidden, bias)
        | linear(f"{at}out_proj", hidden, inner, bias)
    )


def _hybrid(changes: dict[str, Any], *matters: dict[str, Any]) -> Model:
    config = HYBRID | changes
    count, inner, hidden = (config[key] for key in ("num_local_experts", "intermediate_size", "hidden_size"))
    shared = {"joined": "input_linear", "names": ("", "", "output_linear")}

    def layer(index: int) -> Shapes:
        mixer = _granite_mixer(config) if config["layer_types"][index] == "mamba" else attention(config)
        routed: Shapes = {}
        if count:
            at = "block_sparse_moe."
            routed = {
                f"{at}router.layer.weight": (count, hidden),
                f"{at}input_linear.weight": (count, 2 * inner, hidden),
            }
            routed |= {f"{at}output_linear.weight": (count, hidden, inner)}
        routed |= mlp(config, config["shared_intermediate_size"], at="shared_mlp.", **shared)
        return mixer | routed | norms(config, "input_layernorm", "post_attention_layernorm")

    return Model(config, decoder(config, layer), matters=matters)


def _nemotron(changes: dict[str, Any], *matters: dict[str, Any]) -> Model:
    config = NEMOTRON | changes
    hidden, inner, bias = config["hidden_size"], config["intermediate_size"], config["mlp_bias"]
    mamba = (
        *(hidden, config["mamba_num_heads"], config["mamba_num_heads"] * config["mamba_head_dim"]),
        *(config["n_groups"] * config["ssm_state_size"], config["conv_kernel"]),
        *(config["use_bias"], config["use_conv_bias"]),
    )
    plain = linear("mixer.up_proj", inner, hidden, bias) | linear("mixer.down_proj", hidden, inner, bias)
    of_kinds = {"M": _mixer("mixer.", *mamba), "*": attention(config, at="mixer."), "-": plain, "E": {}}
    if "E" in config["hybrid_override_pattern"]:
        of_kinds["E"] = _nemotron_experts(config)
    shapes: Shapes = {"backbone.embeddings.weight": (config["vocab_size"], hidden)}
    for index, kind in enumerate(config["hybrid_override_pattern"]):
        layer = of_kinds[kind] | norms(config, "norm")
        shapes |= {f"backbone.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes |= {"backbone.norm_f.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}
    return Model(config, shapes, matters=matters)


def _nemotron_experts(config: dict[str, Any]) -> Shapes:
    hidden, count, shared = (
        config[key] for key in ("hidden_size", "n_routed_experts", "moe_shared_expert_intermediate_size")
    )
    shapes = linear("mixer.gate", count, hidden) | {"mixer.gate.e_score_correction_bias": (count,)}
    shapes |= linear("mixer.shared_experts.up_proj", shared, hidden)
    shapes |= linear("mixer.shared_experts.down_proj", hidden, shared)
    inner, latent = config["moe_intermediate_size"], config["moe_latent_size"] or hidden
    if config["moe_latent_size"]:
        shapes |= linear("mixer.fc1_latent_proj", latent, hidden) | linear("mixer.fc2_latent_proj", hidden, latent)
    for number in range(count):
        shapes |= linear(f"mixer.experts.{number}.up_proj", inner, latent)
        shapes |= linear(f"mixer.experts.{number}.down_proj", latent, inner)
    return shapes


def _falcon(changes: dict[str, Any], *matters: dict[str, Any]) -> Model:
    config = FALCON | changes
    mamba = config["hidden_size"], config["mamba_n_heads"], config["mamba_d_ssm"]
    shared = config["mamba_n_groups"] * config["mamba_d_state"]

    def layer(_: int) -> Shapes:
        mixer = _mixer("mamba.", *mamba, shared, config["mamba_d_conv"], False, config["mamba_conv_bias"])
        if not config["mamba_rms_norm"]:
            del mixer["mamba.norm.weight"]
        rest = mlp(config, at="feed_forward.") | norms(config, "input_layernorm", "pre_ff_layernorm")
        return mixer | attention(config) | rest

    shapes = decoder(config, layer)
    shapes["model.final_layernorm.weight"] = shapes.pop("model.norm.weight")
    return Model(config, shapes, matters=matters)


def models() -> dict[str, Model]:
    return {
        "granite-hybrid": _hybrid({}, {"num_experts_per_tok": 2}, {"position_embedding_type": "rope"}),
        "granite-hybrid-dense": _hybrid(
            {
                "mamba_conv_bias": False,
                "mamba_d_conv": 3,
                "mamba_n_groups": 2,
                "mamba_proj_bias": True,
                "num_local_experts": 0,
                "position_embedding_type": "rope",
                "tie_word_embeddings": False,
            },
            {"position_embedding_type": "nope"},
            {"time_step_limit": [0.5, 1.0]},
        ),
        "falcon-h1": _falcon(
            {},
            {"attention_in_multiplier": 1.0},
            {"attention_out_multiplier": 1.0},
            {"embedding_multiplier": 1.0},
            {"key_multiplier": 2.0},
            {"lm_head_multiplier": 1.0},
            {"mlp_multipliers": [1.0, 0.8]},
            {"mlp_multipliers": [0.7, 1.0]},
            {"ssm_in_multiplier": 1.0},
            {"ssm_out_multiplier": 1.0},
            {"ssm_multipliers": [0.7, 0.9, 1.2, 0.8, 2.0]},
        ),
        "falcon-h1-norms": _falcon({"mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_n_groups": 2}),
        "nemotron-h": _nemotron({}, {"time_step_min": 0.5}),
        "nemotron-h-biases": _nemotron(
            {"mlp_bias": True, "use_bias": True, "use_conv_bias": False, "n_groups": 1, "head_dim": 16}
        ),
        "nemotron3": _nemotron(
            NEMOTRON3,
            {"n_group": 1, "topk_group": 1},
            {"norm_topk_prob": False},
            {"num_experts_per_tok": 2},
            {"routed_scaling_factor": 1.0},
        ),
        "nemotron3-latent": _nemotron(NEMOTRON3 | {"moe_latent_size": 32, "n_group": 1, "topk_group": 1}),
    }
