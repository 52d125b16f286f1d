"""The conventions of llama.cpp's converter for Gemma 3n and 4, Llama 4, MiniCPM 3, Phi-3.5-MoE, GPT-NeoX, and the
families of `support.gguf_latent`.

`support.gguf_hybrids` writes the files. The tensors are those of `families`; each function follows the class of its
architecture in `conversion/` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np
from support.gguf_files import ROLES
from support.gguf_latent import LATENT_FACTS, LATENT_ROLES, latent

Config = Mapping[str, Any]
EXPERTS = {"w1": "gate", "w3": "up", "w2": "down"}
"""Name of an expert's projection in some folders -> name in a file."""

_GEMMA = {
    **ROLES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_NEOX_ROLES = {
    "embed_in": "token_embd",
    "final_layer_norm": "output_norm",
    "embed_out": "output",
    "input_layernorm": "attn_norm",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
OF_ARCHITECTURE = {
    "gemma3n": {
        **_GEMMA,
        "altup.correction_coefs": "altup_correct_coef",
        "altup.prediction_coefs": "altup_predict_coef",
        "altup.modality_router": "altup_router",
        "altup.router_norm": "altup_router_norm",
        "laurel.linear_left": "laurel_l",
        "laurel.linear_right": "laurel_r",
        "laurel.post_laurel_norm": "laurel_post_norm",
    },
    "gemma4": {
        **_GEMMA,
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "router.proj": "ffn_gate_inp",
    },
    "llama4": {
        **ROLES,
        "feed_forward.router": "ffn_gate_inp",
        **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
        **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    },
    "minicpm3": {
        **ROLES,
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
    },
    "phimoe": {**ROLES, "block_sparse_moe.gate": "ffn_gate_inp"},
    "gptneox": _NEOX_ROLES,
    **LATENT_ROLES,
}
"""Architecture -> name in the folder -> name in the file."""

_NAMES = {
    "layer_scalar": "layer_output_scale.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def _gemma(name: str, array: np.ndarray, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    yield _NAMES.get(name, name), array


def _gemma4(name: str, array: np.ndarray, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    yield from _gemma(name, array, config)
    if name == "model.norm.weight":
        pairs = config["global_head_dim"] // 2
        rotated = int(config["rope_parameters"]["full_attention"]["partial_rotary_factor"] * pairs)
        yield "rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (pairs - rotated), np.float32)


def _llama4(name: str, array: np.ndarray, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    """Experts are [experts, inputs, outputs] in the folder."""
    if name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), np.split(array, 2, axis=2), strict=True):
            yield f"ffn_{part}_exps.weight", half.swapaxes(1, 2)
    elif name.endswith("experts.down_proj"):
        yield "ffn_down_exps.weight", array.swapaxes(1, 2)
    else:
        yield name, array


def _longrope(name: str, array: np.ndarray, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    yield name, array
    if name == "model.norm.weight" and config["rope_scaling"] is not None:
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", np.array(config["rope_scaling"][f"{kind}_factor"], np.float32)


def _gpt_neox(name: str, array: np.ndarray, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    if "query_key_value" in name:
        parts = array.reshape(config["num_attention_heads"], 3, -1, *array.shape[1:])
        array = parts.swapaxes(0, 1).reshape(array.shape)
    yield name, array


CONVERTERS: dict[str, Callable[[str, np.ndarray, Config], Iterator[tuple[str, np.ndarray]]]] = {
    "gemma3n": _gemma,
    "gemma4": _gemma4,
    "llama4": _llama4,
    "minicpm3": _longrope,
    "phimoe": _longrope,
    "gptneox": _gpt_neox,
    **dict.fromkeys(LATENT_ROLES, latent),
}


def _gemma3n_facts(config: Config) -> dict[str, Any]:
    scales = [NormalDist().inv_cdf(each) if each else float("-inf") for each in config["activation_sparsity_pattern"]]
    return {
        **_windows(config),
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "activation_sparsity_scale": scales,
    }


def _windows(config: Config) -> dict[str, Any]:
    cap = config["final_logit_softcapping"]
    return {
        **({"final_logit_softcapping": cap} if cap else {}),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [each == "sliding_attention" for each in config["layer_types"]],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
    }


def _gemma4_facts(config: Config) -> dict[str, Any]:
    count, ropes = config["num_hidden_layers"], config["rope_parameters"]
    own = {**_windows(config), "rope.freq_base": ropes["full_attention"]["rope_theta"]}
    own["rope.freq_base_swa"] = ropes["sliding_attention"]["rope_theta"]
    for part in ("key", "value"):
        own[f"attention.{part}_length"] = config["global_head_dim"]
        own[f"attention.{part}_length_swa"] = config["head_dim"]
    own |= {"rope.dimension_count": config["global_head_dim"], "rope.dimension_count_swa": config["head_dim"]}
    if config["use_double_wide_mlp"]:
        first, inner = count - config["num_kv_shared_layers"], config["intermediate_size"]
        own["feed_forward_length"] = [inner * (1 + (index >= first)) for index in range(count)]
    if config.get("num_global_key_value_heads"):
        counts = config["num_key_value_heads"], config["num_global_key_value_heads"]
        own["attention.head_count_kv"] = [counts[each == "full_attention"] for each in config["layer_types"]]
    if config["enable_moe_block"]:
        own |= {"expert_count": config["num_experts"], "expert_used_count": config["top_k_experts"]}
        own["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return own


def _llama4_facts(config: Config) -> dict[str, Any]:
    return {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "rope.dimension_count": config["head_dim"],
    }


def _minicpm3_facts(config: Config) -> dict[str, Any]:
    return {
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "rope.dimension_count": config["qk_rope_head_dim"],
    }


def _phimoe_facts(config: Config) -> dict[str, Any]:
    scaling = config["rope_scaling"]
    factor = {} if scaling is None else {"rope.scaling.attn_factor": scaling["long_mscale"]}
    first = (
        {} if scaling is None else {"rope.scaling.original_context_length": scaling["original_max_position_embeddings"]}
    )
    return {
        **factor,
        **first,
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "attention.sliding_window": config["sliding_window"] or 0,
    }


def _neox_facts(config: Config) -> dict[str, Any]:
    own = config["hidden_size"] // config["num_attention_heads"]
    return {
        "rope.dimension_count": int(config["rotary_pct"] * own),
        "use_parallel_residual": config.get("use_parallel_residual", True),
        "attention.layer_norm_epsilon": config["layer_norm_eps"],
    }


FACTS: dict[str, Callable[[Config], dict[str, Any]]] = {
    "gemma3n": _gemma3n_facts,
    "gemma4": _gemma4_facts,
    "llama4": _llama4_facts,
    "minicpm3": _minicpm3_facts,
    "phimoe": _phimoe_facts,
    "gptneox": _neox_facts,
    **LATENT_FACTS,
}
"""Architecture -> its metadata."""
