"""Mixtral, MiniMax-M2, and the experts of Qwen, ERNIE, Hunyuan and Granite: each token uses a few of many experts."""

from __future__ import annotations

from typing import Any

from families.llama import MISTRAL
from families.llama_likes import ERNIE, GRANITE, HUNYUAN, HUNYUAN_NORMS
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
ERNIE_MOE: dict[str, Any] = ERNIE | {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "moe_intermediate_size": 40, "moe_k": 3,
    "moe_layer_end_index": 2, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 8,
    "moe_num_shared_experts": 2,
}  # fmt: skip
HUNYUAN_MOE: dict[str, Any] = HUNYUAN | {
    "architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "intermediate_size": 48,
    "moe_topk": [2, 2, 2], "num_experts": 6,
}  # fmt: skip
GRANITE_MOE: dict[str, Any] = GRANITE | {
    "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "intermediate_size": 40,
    "num_experts_per_tok": 3, "num_local_experts": 8,
}  # fmt: skip
MINIMAX: dict[str, Any] = MIXTRAL | {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "head_dim": 32, "num_experts_per_tok": 3,
    "num_local_experts": 8, "qk_norm_type": "per_layer", "rotary_dim": 16, "rope_theta": 5000000,
    "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True,
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


def _ernie(config: dict[str, Any], *matters: dict[str, Any]) -> Model:
    count, inner = config["moe_num_experts"], config["moe_intermediate_size"]

    def layer(index: int) -> Shapes:
        feed_forward = mlp(config)
        if index >= config["moe_layer_start_index"]:
            feed_forward = experts(config, count, inner)
            feed_forward |= mlp(config, inner * config["moe_num_shared_experts"], at="mlp.shared_experts.")
            feed_forward["mlp.moe_statics.e_score_correction_bias"] = (1, count)
        return attention(config) | feed_forward | norms(config, *NORMS)

    return Model(config, decoder(config, layer), matters=({"moe_k": 2}, *matters))


def _hunyuan(config: dict[str, Any], *matters: dict[str, Any]) -> Model:
    def layer(_: int) -> Shapes:
        routed = experts(config, config["num_experts"], config["intermediate_size"], router="gate.wg")
        routed |= mlp(config, at="mlp.shared_mlp.")
        return attention(config, head_norms=True, norm_names=HUNYUAN_NORMS) | routed | norms(config, *NORMS)

    return Model(config, decoder(config, layer), matters=({"moe_topk": 1}, *matters))


def _granite(config: dict[str, Any], *matters: dict[str, Any]) -> Model:
    count, inner, hidden = (config[key] for key in ("num_local_experts", "intermediate_size", "hidden_size"))

    def layer(_: int) -> Shapes:
        at = "block_sparse_moe."
        routed = {f"{at}router.layer.weight": (count, hidden), f"{at}input_linear.weight": (count, 2 * inner, hidden)}
        routed |= {f"{at}output_linear.weight": (count, hidden, inner)}
        return attention(config) | routed | norms(config, *NORMS)

    return Model(config, decoder(config, layer), matters=({"num_experts_per_tok": 2}, *matters))


def _minimax(config: dict[str, Any], *matters: dict[str, Any]) -> Model:
    at, count = "block_sparse_moe.", config["num_local_experts"]

    def layer(_: int) -> Shapes:
        routed = experts(config, count, config["intermediate_size"], at=at, names=("w1", "w3", "w2"))
        routed[f"{at}e_score_correction_bias"] = (count,)
        return attention(config, whole_norms=True) | routed | norms(config, *NORMS)

    return Model(config, decoder(config, layer), matters=({"num_experts_per_tok": 2}, *matters))


def models() -> dict[str, Model]:
    window = {"sliding_window": NEAR, "head_dim": 24}
    return {
        "mixtral": _mixtral({}, {"rope_theta": 10000.0}),
        "mixtral-window": _mixtral(window, {"sliding_window": None}, lengths=(SHORT, CROSSING, LONG)),
        "ernie4.5-moe": _ernie(ERNIE_MOE),
        "hunyuan-moe": _hunyuan(HUNYUAN_MOE),
        "granite-moe": _granite(GRANITE_MOE),
        "minimax-m2": _minimax(MINIMAX, {"rotary_dim": 32}),
        "qwen2-moe": _qwen_moe(QWEN2_MOE),
        "qwen3-moe": _qwen_moe(QWEN3_MOE),
        "qwen3-moe-mixed": _qwen_moe(
            QWEN3_MOE
            | {"decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": False, "num_hidden_layers": 4}
        ),
    }
