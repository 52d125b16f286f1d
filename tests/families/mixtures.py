"""Mixtral, Qwen2-MoE and Qwen3-MoE: each token uses a few of many experts."""

from __future__ import annotations

from typing import Any

from families.llama import MISTRAL
from families.model import CROSSING, LONG, NEAR, SHORT, Model
from families.qwen import QWEN2, QWEN3
from families.shapes import Shapes, attention, decoder, experts, linear, mlp, norms

MIXTRAL: dict[str, Any] = MISTRAL | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "intermediate_size": 48,
    "num_experts_per_tok": 2, "num_local_experts": 6, "output_router_logits": False, "rope_theta": 1e6,
    "router_aux_loss_coef": 0.02, "sliding_window": None,
}  # fmt: skip
QWEN2_MOE: dict[str, Any] = QWEN2 | {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 96, "decoder_sparse_step": 1,
    "moe_intermediate_size": 40, "norm_topk_prob": False, "num_experts": 8, "num_experts_per_tok": 3,
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 88,
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
    "mlp_only_layers": [], "moe_intermediate_size": 40, "norm_topk_prob": True, "num_experts": 8,
    "num_experts_per_tok": 3, "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm")


def _mixtral(changes: dict[str, Any], *matters: dict[str, Any], **facts: Any) -> Model:
    config = MIXTRAL | changes
    inner = config["intermediate_size"]

    def layer(_: int) -> Shapes:
        routed = experts(config, config["num_local_experts"], inner, at="block_sparse_moe.", names=("w1", "w3", "w2"))
        return attention(config) | routed | norms(config, *NORMS)

    return Model(config, decoder(config, layer), matters=({"num_experts_per_tok": 1}, *matters), **facts)


def _qwen_moe(config: dict[str, Any], *matters: dict[str, Any]) -> Model:
    third = config["model_type"] == "qwen3_moe"

    def feed_forward(index: int) -> Shapes:
        if index in config.get("mlp_only_layers", []) or (index + 1) % config["decoder_sparse_step"]:
            return mlp(config)
        routed = experts(config, config["num_experts"], config["moe_intermediate_size"])
        if third:
            return routed
        shared = mlp(config, config["shared_expert_intermediate_size"], at="mlp.shared_expert.")
        return routed | shared | linear("mlp.shared_expert_gate", 1, config["hidden_size"])

    def layer(index: int) -> Shapes:
        return attention(config, bias=not third, head_norms=third) | feed_forward(index) | norms(config, *NORMS)

    changed = ({"num_experts_per_tok": 2}, {"norm_topk_prob": not config["norm_topk_prob"]})
    return Model(config, decoder(config, layer), matters=(*changed, *matters))


def models() -> dict[str, Model]:
    window = {"sliding_window": NEAR, "head_dim": 24}
    return {
        "mixtral": _mixtral({}, {"rope_theta": 10000.0}),
        "mixtral-window": _mixtral(window, {"sliding_window": None}, lengths=(SHORT, CROSSING, LONG)),
        "qwen2-moe": _qwen_moe(QWEN2_MOE),
        "qwen3-moe": _qwen_moe(QWEN3_MOE),
        "qwen3-moe-mixed": _qwen_moe(
            QWEN3_MOE
            | {"decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": False, "num_hidden_layers": 4}
        ),
    }
