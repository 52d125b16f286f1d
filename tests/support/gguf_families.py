"""Models of every architecture as GGUF files, by the conventions of llama.cpp's converter.

The converter only moves elements, except that it adds 1 to the norm weights of Gemma. So it is applied to the positions
of the elements, and gives the values of a Hugging Face folder for any values that are stored in the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from llm_serving.models.spec import ModelSpec
from support.family_configs import RandomTensors
from support.gguf_files import ELEMENTS, FACTS, ROLES, Stored, gguf_bytes, neighbours, plain, random_matrix

Arrays = dict[str, np.ndarray]

PAIRS = ("llama", "mistral3", "granite", "granitemoe", "smollm3", "internlm2", "baichuan")
"""Architectures whose rows of query and key are reordered."""
PLUS_ONE = ("gemma", "gemma2", "gemma3")

_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_STACKED = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
_SHARED = {
    f"{name}.{part}_proj": f"ffn_{part}_shexp"
    for name in ("mlp.shared_expert", "mlp.shared_experts", "mlp.shared_mlp")
    for part in ("gate", "up", "down")
}
_AFTER = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_HUNYUAN = {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}
_LFM2 = {
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.out_proj": "attn_output",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b",
}
_MORE_ROLES = {
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "exaone4": _AFTER,
    "granitemoe": {"block_sparse_moe.router.layer": "ffn_gate_inp"},
    "minimax-m2": {
        "block_sparse_moe.gate": "ffn_gate_inp",
        "block_sparse_moe.e_score_correction_bias": "exp_probs_b",
    },
    "ernie4_5-moe": {
        "mlp.gate": "ffn_gate_inp",
        "mlp.moe_statics.e_score_correction_bias": "exp_probs_b",
        **_SHARED,
    },
    "hunyuan-moe": {"mlp.gate.wg": "ffn_gate_inp", **_HUNYUAN, **_SHARED},
    "gpt-oss": {
        "mlp.router": "ffn_gate_inp",
        "self_attn.sinks": "attn_sinks",
        "post_attention_layernorm": "post_attention_norm",
    },
    "glm4moe": {
        "mlp.gate": "ffn_gate_inp",
        "mlp.gate.e_score_correction_bias": "exp_probs_b",
        "post_attention_layernorm": "post_attention_norm",
        **_SHARED,
    },
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    "olmo2": _AFTER,
    "hunyuan-dense": _HUNYUAN,
    "starcoder2": {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": _STACKED,
    "chatglm": _STACKED,
    "glm4": {**_STACKED, "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    "llama": {"block_sparse_moe.gate": "ffn_gate_inp"},
    "qwen2moe": {"mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp", **_SHARED},
    "qwen3moe": {"mlp.gate": "ffn_gate_inp"},
    "internlm2": {
        "model.tok_embeddings": "token_embd",
        "output": "output",
        "attention_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "attention.wo": "attn_output",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w3": "ffn_up",
        "feed_forward.w2": "ffn_down",
    },
    "deepseek2": {
        "mlp.gate": "ffn_gate_inp",
        "mlp.gate.e_score_correction_bias": "exp_probs_b",
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        **_SHARED,
    },
}
_LOCAL = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_MANY = {
    "first_k_dense_replace": "leading_dense_block_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_CONVOLUTIONS = {"norm_eps": "attention.layer_norm_rms_epsilon", "conv_L_cache": "shortconv.l_cache"}
_MORE_FACTS = {
    "lfm2": _CONVOLUTIONS,
    "lfm2moe": {
        **_CONVOLUTIONS,
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "num_dense_layers": "leading_dense_block_count",
    },
    "exaone4": {"sliding_window": "attention.sliding_window"},
    "granitemoe": {**_GRANITE, **_LOCAL},
    "minimax-m2": {**_LOCAL, "rotary_dim": "rope.dimension_count"},
    "ernie4_5-moe": {
        "moe_num_experts": "expert_count",
        "moe_k": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "moe_num_shared_experts": "expert_shared_count",
        "moe_layer_interval": "interleave_moe_layer_step",
        "moe_layer_start_index": "leading_dense_block_count",
    },
    "hunyuan-moe": {"num_experts": "expert_count", "moe_topk": "expert_used_count"},
    "gpt-oss": {
        **_LOCAL,
        "intermediate_size": "expert_feed_forward_length",
        "sliding_window": "attention.sliding_window",
    },
    "glm4moe": _MANY,
    "olmo2": {"sliding_window": "attention.sliding_window"},
    "command-r": {"logit_scale": "logit_scale"},
    "cohere2": {"logit_scale": "logit_scale", "sliding_window": "attention.sliding_window"},
    "stablelm": {"use_parallel_residual": "use_parallel_residual"},
    "gemma2": {
        "sliding_window": "attention.sliding_window",
        **{f"{a}_logit_softcapping": f"{a}_logit_softcapping" for a in ("attn", "final")},
    },
    "gemma3": {
        "sliding_window": "attention.sliding_window",
        "sliding_window_pattern": "attention.sliding_window_pattern",
    },
    "phi3": {"sliding_window": "attention.sliding_window"},
    "llama": _LOCAL,
    "qwen2moe": {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    },
    "qwen3moe": {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
    },
    "granite": _GRANITE,
    "deepseek2": {
        "q_lora_rank": "attention.q_lora_rank",
        "kv_lora_rank": "attention.kv_lora_rank",
        **_MANY,
        "qk_rope_head_dim": "rope.dimension_count",
    },
}


def family_facts(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of a configuration."""
    known = {**FACTS, **_MORE_FACTS.get(architecture, {})}
    own = {theirs: config[ours] for ours, theirs in known.items() if theirs and config.get(ours) is not None}
    if architecture == "deepseek2":
        rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
        own |= {"attention.head_count_kv": 1, "attention.key_length": rank + rotary, "attention.value_length": rank}
        own["attention.key_length_mla"] = config["qk_nope_head_dim"] + rotary
        own["attention.value_length_mla"] = config["v_head_dim"]
        if config["architectures"] == ["DeepseekV3ForCausalLM"]:
            own |= {"expert_gating_func": 2, "expert_weights_norm": True}
    elif (
        fraction := config.get("partial_rotary_factor", 0.5 if architecture in ("glm4", "glm4moe", "chatglm") else 1)
    ) != 1:
        own["rope.dimension_count"] = int(config["head_dim"] * fraction)
    if "norm_eps" in config:
        kv_heads = config["num_key_value_heads"]
        own["attention.head_count_kv"] = [kv_heads if each != "conv" else 0 for each in config["layer_types"]]
    if architecture in ("glm4moe", "lfm2moe"):
        own |= {"expert_gating_func": 2, "expert_weights_norm": True}
    if architecture == "mistral3":
        own |= _yarn_facts(config["rope_scaling"])
    if architecture in ("olmo2", "exaone4") and "layer_types" in config:
        own["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config["layer_types"]]
    if architecture == "baichuan" and config.get("max_position_embeddings") is None:
        own["context_length"] = config["model_max_length"]
    return {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in own.items()}}


def _yarn_facts(scaling: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention.temperature_scale": scaling["llama_4_scaling_beta"],
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": scaling["factor"],
        "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
        "rope.scaling.yarn_log_multiplier": scaling["mscale_all_dim"],
    }


def family_tensors(architecture: str, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Arrays:
    """Return arrays of a Hugging Face folder under the names and in the layout of a GGUF file."""
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    roles = {**ROLES, **_MORE_ROLES.get(architecture, {})}
    tensors: Arrays = {}
    experts: dict[str, dict[int, np.ndarray]] = {}

    def put(layer: str, role: str, kind: str, array: np.ndarray) -> None:
        if architecture in PAIRS and role in ("attn_q", "attn_k"):
            array = neighbours(array, heads if role == "attn_q" else kv_heads)
        if role == "shortconv.conv":
            array = array[:, 0]
        if role == "ffn_gate_inp_shexp" or (role == "exp_probs_b" and array.ndim == 2):
            array = array[0]
        tensors[f"{f'blk.{layer}.' if layer else ''}{role}.{kind}"] = np.ascontiguousarray(array)

    for name, array in weights.items():
        stem, kind = name.rsplit(".", 1)
        if name.endswith(("_bias", ".sinks")):
            stem, kind = name, "bias" if name.endswith("_bias") else "weight"
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", stem)
        layer, role = (match[1], match[2]) if match else ("", stem)
        if expert := re.fullmatch(r".*\.experts\.(\d+)\.(\w+)", role):
            part = {"w1": "gate", "w3": "up", "w2": "down"}.get(expert[2], expert[2].removesuffix("_proj"))
            experts.setdefault(f"blk.{layer}.ffn_{part}_exps.{kind}", {})[int(expert[1])] = array
        elif role == "attention.wqkv":
            groups = array.reshape(kv_heads, heads // kv_heads + 2, -1, *array.shape[1:])
            for part, found in (("attn_q", groups[:, :-2]), ("attn_k", groups[:, -2]), ("attn_v", groups[:, -1])):
                put(layer, part, kind, found.reshape(-1, *array.shape[1:]))
        elif role == "self_attn.W_pack":
            for part, found in zip(("attn_q", "attn_k", "attn_v"), np.split(array, 3), strict=True):
                put(layer, part, kind, found)
        elif role == "self_attn.kv_b_proj":
            both = array.reshape(heads, -1, array.shape[1])
            still = config["qk_nope_head_dim"]
            put(layer, "attn_k_b", kind, both[:, :still].swapaxes(1, 2))
            put(layer, "attn_v_b", kind, both[:, still:])
        elif architecture == "chatglm" and role == "self_attn.q_proj":
            parts = [weights[f"model.layers.{layer}.self_attn.{each}_proj.{kind}"] for each in "qkv"]
            put(layer, "attn_qkv", kind, np.concatenate(parts))
        elif not (architecture == "chatglm" and role in ("self_attn.k_proj", "self_attn.v_proj")):
            put(layer, roles[role], kind, array)
    for name, found in experts.items():
        tensors[name] = np.stack([found[number] for number in range(len(found))])
    return tensors


def write_family(
    path: Path,
    architecture: str,
    config: Mapping[str, Any],
    kind: int,
    more_facts: Mapping[str, Any] | None = None,
    more_tensors: Mapping[str, Stored] | None = None,
) -> Arrays:
    """Write a random model whose matrices have one type where their columns allow it; return the values of the
    equivalent folder.
    """
    spec = ModelSpec.from_hugging_face(dict(config))
    sizes = {name: int(np.prod(shape)) for name, shape in spec.tensors.items()}
    starts = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    places = {name: (starts[name] + np.arange(sizes[name])).reshape(shape) for name, shape in spec.tensors.items()}
    values = np.concatenate([RandomTensors().read(name, shape).ravel() for name, shape in spec.tensors.items()])
    stored, rng = {}, np.random.default_rng(0)
    for name, at in family_tensors(architecture, config, places).items():
        is_matrix = at.ndim > 1 and not name.endswith(".bias")
        if kind in ELEMENTS and is_matrix and at.shape[-1] % ELEMENTS[kind] == 0:
            matrix, found = random_matrix(kind, (at.size // at.shape[-1], at.shape[-1]), rng)
            stored[name] = Stored(at.shape, kind, matrix.data)
            values[at] = found.reshape(at.shape)
        else:
            is_shifted = architecture in PLUS_ONE and name.endswith("norm.weight")
            stored[name] = plain(values[at] + np.float32(is_shifted))
    facts = {**family_facts(architecture, config), **(more_facts or {})}
    path.write_bytes(gguf_bytes(facts, {**stored, **(more_tensors or {})}))
    return {name: values[at] for name, at in places.items()}
