"""Qwen3-Next and Qwen3.5: the gated delta rule in most layers, attention with an output gate in the others."""

from __future__ import annotations

from typing import Any

from families.model import Model
from families.qwen import QWEN3
from families.shapes import Shapes, attention, decoder, experts, linear, mlp, norms

LINEAR: dict[str, Any] = {
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_value_head_dim": 24, "num_hidden_layers": 4,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 40, "num_experts": 8, "num_experts_per_tok": 3, "output_router_logits": False,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 56,
}  # fmt: skip
QWEN3_NEXT: dict[str, Any] = QWEN3 | LINEAR | EXPERTS | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True, "partial_rotary_factor": 0.25,
}  # fmt: skip
QWEN3_5: dict[str, Any] = {key: value for key, value in QWEN3.items() if key not in ("rope_theta", "rope_scaling")} | {
    **LINEAR, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.25, "rope_theta": 10000000,
        "rope_type": "default",
    },
}  # fmt: skip
QWEN3_5_MOE: dict[str, Any] = QWEN3_5 | EXPERTS | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text",
}  # fmt: skip


def _delta_net(config: dict[str, Any], *, grouped: bool) -> Shapes:
    """Return the tensors of a delta-rule layer. `grouped`: whether rows are grouped by key head."""
    at, hidden = "linear_attn.", config["hidden_size"]
    heads = config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    mixed = 2 * keys + values
    sizes = {"in_proj_qkv": mixed, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    if grouped:
        sizes = {"in_proj_qkvz": mixed + values, "in_proj_ba": 2 * heads}
    shapes: Shapes = {f"{at}A_log": (heads,), f"{at}dt_bias": (heads,)}
    shapes |= {f"{at}conv1d.weight": (mixed, 1, config["linear_conv_kernel_dim"])}
    shapes |= {f"{at}norm.weight": (config["linear_value_head_dim"],)}
    for name, rows in sizes.items():
        shapes |= linear(at + name, rows, hidden)
    return shapes | linear(at + "out_proj", hidden, values)


def _feed_forward(config: dict[str, Any], *, stacked: bool) -> Shapes:
    count, inner, hidden = config.get("num_experts", 0), config.get("moe_intermediate_size", 0), config["hidden_size"]
    if not count:
        return mlp(config)
    routed = experts(config, count, inner)
    if stacked:
        routed = linear("mlp.gate", count, hidden)
        routed |= {"mlp.experts.gate_up_proj": (count, 2 * inner, hidden)}
        routed |= {"mlp.experts.down_proj": (count, hidden, inner)}
    shared = mlp(config, config["shared_expert_intermediate_size"], at="mlp.shared_expert.")
    return routed | shared | linear("mlp.shared_expert_gate", 1, hidden)


def _hybrid(config: dict[str, Any], *matters: dict[str, Any], grouped: bool = False) -> Model:
    every = config["full_attention_interval"]
    usual = ["full_attention" if (i + 1) % every == 0 else "linear" for i in range(config["num_hidden_layers"])]
    kinds = config.get("layer_types", usual)

    def layer(index: int) -> Shapes:
        mixer = _delta_net(config, grouped=grouped)
        if kinds[index] == "full_attention":
            mixer = attention(config, head_norms=True)
            rows, columns = mixer["self_attn.q_proj.weight"]
            mixer["self_attn.q_proj.weight"] = (2 * rows, columns)
        routed = _feed_forward(config, stacked=not grouped)
        return mixer | routed | norms(config, "input_layernorm", "post_attention_layernorm")

    return Model(config, decoder(config, layer), matters=matters, norm_offset=1.0)


def models() -> dict[str, Model]:
    slower = QWEN3_5["rope_parameters"] | {"partial_rotary_factor": 0.5}
    return {
        "qwen3-next": _hybrid(
            QWEN3_NEXT,
            {"partial_rotary_factor": 0.5},
            {"num_experts_per_tok": 2},
            {"norm_topk_prob": False},
            grouped=True,
        ),
        "qwen3.5": _hybrid(QWEN3_5, {"rope_parameters": slower}, {"rms_norm_eps": 0.05}),
        "qwen3.5-tied": _hybrid(QWEN3_5 | {"tie_word_embeddings": True, "linear_num_value_heads": 2, "head_dim": 24}),
        "qwen3.5-moe": _hybrid(QWEN3_5_MOE, {"num_experts_per_tok": 2}),
    }
