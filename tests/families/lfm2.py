"""LFM2 and LFM2-MoE: most layers have a short convolution, which keeps a state, in place of attention."""

from __future__ import annotations

from typing import Any

from families.model import FAR, PUBLISHED, Model
from families.shapes import Shapes, attention, decoder, experts, linear, mlp, norms

KINDS = ["conv", "full_attention", "conv", "conv"]
LFM2: dict[str, Any] = {
    **PUBLISHED, "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 16, "conv_L_cache": 3, "conv_bias": False,
    "hidden_size": 64, "intermediate_size": 160, "layer_types": KINDS, "max_position_embeddings": FAR,
    "norm_eps": 1e-5, "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}, "tie_word_embeddings": True,
    "vocab_size": 200,
}  # fmt: skip
LFM2_MOE: dict[str, Any] = LFM2 | {
    "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "intermediate_size": 112,
    "moe_intermediate_size": 40, "norm_topk_prob": True, "num_dense_layers": 1, "num_experts": 8,
    "num_experts_per_tok": 3, "routed_scaling_factor": 1.0, "use_expert_bias": True,
}  # fmt: skip
OPERATIONS = ("operator_norm", "ffn_norm")
PARTS = ("w1", "w3", "w2")
HEAD_NORMS = ("q_layernorm", "k_layernorm")


def _lfm2(config: dict[str, Any], inner: int, *matters: dict[str, Any], **facts: Any) -> Model:
    hidden, bias, at = config["hidden_size"], config["conv_bias"], "feed_forward."

    def layer(index: int) -> Shapes:
        if config["layer_types"][index] == "conv":
            mixer = linear("conv.in_proj", 3 * hidden, hidden, bias) | linear("conv.out_proj", hidden, hidden, bias)
            mixer |= {"conv.conv.weight": (hidden, 1, config["conv_L_cache"])}
            mixer |= {"conv.conv.bias": (hidden,)} if bias else {}
        else:
            mixer = attention(config, head_norms=True, norm_names=HEAD_NORMS, out="out_proj")
        feed_forward = mlp(config, inner, at=at, names=PARTS)
        if index >= config.get("num_dense_layers", config["num_hidden_layers"]):
            feed_forward = experts(config, config["num_experts"], config["moe_intermediate_size"], at=at, names=PARTS)
            feed_forward[f"{at}expert_bias"] = (config["num_experts"],)
        return mixer | feed_forward | norms(config, *OPERATIONS)

    shapes = decoder(config, layer)
    shapes["model.embedding_norm.weight"] = shapes.pop("model.norm.weight")
    return Model(config, shapes, matters=matters, **facts)


def models() -> dict[str, Model]:
    theta = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    whole = {"block_auto_adjust_ff_dim": False, "intermediate_size": 112, "conv_bias": True, "conv_L_cache": 4}
    return {
        "lfm2": _lfm2(LFM2, 112, theta, {"norm_eps": 0.05}),
        "lfm2-biases": _lfm2(LFM2 | whole | {"tie_word_embeddings": False}, 112),
        "lfm2-moe": _lfm2(LFM2_MOE, 112, {"num_experts_per_tok": 2}, {"norm_topk_prob": False}),
    }
