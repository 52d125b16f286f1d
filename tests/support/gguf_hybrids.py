"""Small models that mix attention with other layers, and encoders, as GGUF files of llama.cpp's converter.

The tensors are those of `families` and `families.encoders`; each function follows the class of its architecture in
`conversion/` of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from support.gguf_attention import CONVERTERS, EXPERTS, FACTS, OF_ARCHITECTURE
from support.gguf_files import ELEMENTS, ROLES, Stored, gguf_bytes, neighbours, plain, q8_0

Arrays = dict[str, np.ndarray]
Config = Mapping[str, Any]

_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
}
_MIXER = {
    "in_proj": "ssm_in",
    "conv1d": "ssm_conv1d",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
    **{f"{part}_proj": f"attn_{part}" for part in "qkv"},
    "o_proj": "attn_output",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
_DELTA = {
    "in_proj_qkv": "attn_qkv",
    "in_proj_z": "attn_gate",
    "in_proj_ba": "ssm_ba",
    "in_proj_b": "ssm_beta",
    "in_proj_a": "ssm_alpha",
    **{name: _MIXER[name] for name in ("conv1d", "A_log", "norm", "out_proj")},
}
_ROLES = {
    **ROLES,
    "post_attention_layernorm": "post_attention_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{f"linear_attn.{name}": role for name, role in _DELTA.items()},
}
_GRANITE_ROLES = {
    **ROLES,
    **{f"mamba.{name}": role for name, role in _MIXER.items()},
    "block_sparse_moe.router.layer": "ffn_gate_inp",
}
_FALCON_ROLES = {
    **_GRANITE_ROLES,
    "model.final_layernorm": "output_norm",
    "pre_ff_layernorm": "ffn_norm",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_NEMOTRON_ROLES = {
    "embeddings": "token_embd",
    "norm_f": "output_norm",
    "lm_head": "output",
    "norm": "attn_norm",
    **{f"mixer.{name}": role for name, role in _MIXER.items()},
}
_NEMOTRON_EXPERTS = {
    "mixer.gate": "ffn_gate_inp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    **{f"mixer.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("up", "down")},
}
_BERT_ROLES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
    "classifier.dense": "cls",
    "classifier.out_proj": "cls.output",
}
_MODERN_ROLES = {
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.norm": "token_embd_norm",
    "attn_norm": "attn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
    "final_norm": "output_norm",
    "head.dense": "cls",
    "head.norm": "cls.norm",
    "classifier": "cls.output",
}
_OF_ARCHITECTURE = {
    "granitehybrid": _GRANITE_ROLES,
    "falcon-h1": _FALCON_ROLES,
    "nemotron_h": _NEMOTRON_ROLES,
    "nemotron_h_moe": {**_NEMOTRON_ROLES, **_NEMOTRON_EXPERTS},
    "bert": _BERT_ROLES,
    "modern-bert": _MODERN_ROLES,
    **OF_ARCHITECTURE,
}
_STREAMS = {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}


def tensors_of(architecture: str, config: Config, weights: Mapping[str, np.ndarray]) -> Arrays:
    """Return the tensors of a folder under the names and in the layout of a GGUF file."""
    roles, found, experts = _OF_ARCHITECTURE.get(architecture, _ROLES), {}, {}
    convert = _CONVERTERS.get(architecture, _unchanged)
    for name, array in weights.items():
        match = re.fullmatch(r"(?:model|backbone|gpt_neox|bert|roberta)?\.?(?:encoder\.)?layers?\.(\d+)\.(.*)", name)
        layer, rest = (f"blk.{match[1]}.", match[2]) if match else ("", name)
        rest = re.sub(r"^(backbone|gpt_neox|bert|roberta)\.|^model\.(?=final_norm|embeddings)", "", rest)
        for whole, part in convert(rest, array, config):
            stem, _, kind = whole.rpartition(".")
            stem, kind = (stem, f".{kind}") if kind in ("weight", "bias") else (whole, "")
            if expert := re.fullmatch(r".*\.experts\.(\d+)\.(\w+)", stem):
                of = EXPERTS.get(expert[2], expert[2].removesuffix("_proj"))
                experts.setdefault(f"{layer}ffn_{of}_exps.weight", []).append(part)
                continue
            if stream := re.fullmatch(r"model\.(altup_\w+)\.\d+", stem):
                experts.setdefault(f"{_STREAMS[stream[1]]}.weight", []).append(part)
                continue
            stem, kind = (stem.removesuffix("dt_bias") + "dt", ".bias") if stem.endswith("dt_bias") else (stem, kind)
            role = "ssm_dt" if stem.endswith(".dt") else roles.get(stem, stem)
            without = architecture == "falcon-h1" and role == "ffn_norm"  # the converter omits `.weight`
            found[f"{layer}{role}{'' if without else kind}"] = part
    return {name: np.ascontiguousarray(each) for name, each in found.items()} | {
        name: np.stack(parts) for name, parts in experts.items()
    }


Converter = Callable[[str, np.ndarray, Config], Iterator[tuple[str, np.ndarray]]]


def _unchanged(name: str, array: np.ndarray, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    yield name, array


def _mixer(name: str, array: np.ndarray, groups: int) -> np.ndarray:
    """Return a tensor of a Mamba-2 mixer."""
    if name.endswith("A_log"):
        return -np.exp(array)[:, None]
    if name.endswith(".D"):
        return array[:, None]
    if name.endswith("conv1d.weight"):
        return array[:, 0]
    return array.reshape(groups, -1) if name.endswith(".norm.weight") else array


def _granite(name: str, array: np.ndarray, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    ending = "_shexp" if config["num_local_experts"] else ""
    if name.endswith("input_linear.weight"):
        ending = ending if name.startswith("shared") else "_exps"
        for part, half in zip(("gate", "up"), np.split(array, 2, axis=-2), strict=True):
            yield f"ffn_{part}{ending}.weight", half
    elif name.endswith("output_linear.weight"):
        yield f"ffn_down{ending if name.startswith('shared') else '_exps'}.weight", array
    elif name.startswith("mamba."):
        yield name, _mixer(name, array, config["mamba_n_groups"])
    elif name.endswith(("q_proj.weight", "k_proj.weight")):
        yield name, neighbours(array, config["num_attention_heads" if "q_" in name else "num_key_value_heads"])
    else:
        yield name, array


def _falcon(name: str, array: np.ndarray, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    gate, down = config["mlp_multipliers"]
    before = config["attention_in_multiplier"]
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config["key_multiplier"] * before,
        "q_proj": before,
        "v_proj": before,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    factor = next((value for part, value in factors.items() if name.split(".")[-2:-1] == [part]), 1.0)
    if name.endswith("in_proj.weight"):
        inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (inner, inner, shared, shared, config["mamba_n_heads"])
        factor = config["ssm_in_multiplier"] * np.repeat(config["ssm_multipliers"], sizes)[:, None]
    yield name, _mixer(name, (array * np.float32(factor)).astype(np.float32), config["mamba_n_groups"])


def _nemotron(name: str, array: np.ndarray, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        array = neighbours(array, config["num_attention_heads" if "q_" in name else "num_key_value_heads"])
    if name.endswith("e_score_correction_bias"):
        name = "exp_probs_b.bias"
    yield name, _mixer(name, array, config["n_groups"]) if name.startswith("mixer.") else array


def _qwen(name: str, array: np.ndarray, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    if name.endswith("A_log"):
        array = -np.exp(array)
    elif "conv1d" in name:
        array = array[:, 0]
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        array = array + np.float32(1)
    if "in_proj_qkvz" in name:
        ratio = config["linear_num_value_heads"] // config["linear_num_key_heads"]
        q, v = config["linear_key_head_dim"], ratio * config["linear_value_head_dim"]
        groups = array.reshape(config["linear_num_key_heads"], -1, array.shape[1])
        parts = [each.reshape(-1, array.shape[1]) for each in np.split(groups, (q, 2 * q, 2 * q + v), axis=1)]
        yield "attn_qkv.weight", np.concatenate(parts[:3])
        yield "attn_gate.weight", parts[3]
    elif name.startswith("mlp.experts.gate_up_proj"):
        for part, half in zip(("gate", "up"), np.split(array, 2, axis=-2), strict=True):
            yield f"ffn_{part}_exps.weight", half
    elif name.startswith("mlp.experts.down_proj"):
        yield "ffn_down_exps.weight", array
    else:
        yield name, array


def _qwen35(name: str, array: np.ndarray, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]

    def tiled(part: np.ndarray, axis: int = 0) -> np.ndarray:
        part = np.moveaxis(part, axis, 0)
        rows = part.reshape(keys, heads // keys, -1, *part.shape[1:]).swapaxes(0, 1).reshape(part.shape)
        return np.moveaxis(rows, 0, axis)

    if name.startswith("linear_attn.") and not name.endswith(".norm.weight"):
        before = array.shape[0] - heads * config["linear_value_head_dim"]
        if "in_proj_qkv" in name or "conv1d" in name:
            array = np.concatenate([array[:before], tiled(array[before:])])
        else:
            array = tiled(array, 1 if "out_proj" in name else 0)
    yield from _qwen(name, array, config)


def _bert(name: str, array: np.ndarray, config: Config) -> Iterator[tuple[str, np.ndarray]]:
    if name == "embeddings.position_embeddings.weight" and config["model_type"] == "xlm-roberta":
        array = array[config["pad_token_id"] + 1 :]
    if not name.startswith("pooler."):
        yield name, array


_CONVERTERS: dict[str, Converter] = {
    "granitehybrid": _granite,
    "falcon-h1": _falcon,
    "nemotron_h": _nemotron,
    "nemotron_h_moe": _nemotron,
    "qwen3next": _qwen,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
    "bert": _bert,
    **CONVERTERS,
}


def facts_of(architecture: str, config: Config) -> dict[str, Any]:
    """Return the metadata of a configuration."""
    own = {theirs: config[ours] for ours, theirs in _SIZES.items() if config.get(ours) is not None}
    if "attention.key_length" in own:
        own["attention.value_length"] = own["attention.key_length"]
    own |= _FACTS[architecture](config)
    if "rope.freq_base" in own:
        own["rope.freq_base"] = float(own["rope.freq_base"])
    return {"general.architecture": architecture, **{f"{architecture}.{key}": value for key, value in own.items()}}


def _ssm(config: Config, prefix: str, inner: int, heads: str) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config[f"{prefix}d_conv"],
        "ssm.state_size": config[f"{prefix}d_state"],
        "ssm.group_count": config[f"{prefix}n_groups"],
        "ssm.inner_size": inner,
        "ssm.time_step_rank": config[heads],
    }


def _granite_facts(config: Config) -> dict[str, Any]:
    kinds = config["layer_types"]
    return {
        "attention.head_count_kv": [config["num_key_value_heads"] if each == "attention" else 0 for each in kinds],
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"] if config["num_local_experts"] else 0,
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "rope.scaling.finetuned": False,
        **_ssm(config, "mamba_", config["mamba_expand"] * config["hidden_size"], "mamba_n_heads"),
    }


def _falcon_facts(config: Config) -> dict[str, Any]:
    return _ssm(config, "mamba_", config["mamba_d_ssm"], "mamba_n_heads")


def _nemotron_facts(config: Config) -> dict[str, Any]:
    pattern = config["hybrid_override_pattern"]
    sizes = {"-": config["intermediate_size"], "E": config.get("moe_intermediate_size", 0)}
    experts = (
        {
            "expert_count": config["n_routed_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_group_count": config["n_group"],
            **({"moe_latent_size": config["moe_latent_size"]} if config.get("moe_latent_size") else {}),
        }
        if "E" in pattern
        else {}
    )
    return {
        **experts,
        "attention.head_count_kv": [config["num_key_value_heads"] if each == "*" else 0 for each in pattern],
        "feed_forward_length": [sizes.get(each, 0) for each in pattern],
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "rope.dimension_count": config["hidden_size"] // config["num_attention_heads"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.time_step_rank": config["mamba_num_heads"],
    }


def _qwen_facts(config: Config) -> dict[str, Any]:
    heads, rope = config["linear_num_value_heads"], config.get("rope_parameters", {})
    known = {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    }
    kinds = config.get("layer_types")
    return {
        **{theirs: config[ours] for ours, theirs in known.items() if ours in config},
        **({"attention.recurrent_layers": [each == "linear_attention" for each in kinds]} if kinds else {}),
        "full_attention_interval": config["full_attention_interval"],
        "rope.dimension_count": config["head_dim"] // 4,
        **({"rope.dimension_sections": [*rope["mrope_section"], 0]} if rope else {}),
        "rope.freq_base": rope.get("rope_theta", config.get("rope_theta")),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.inner_size": heads * config["linear_value_head_dim"],
        "ssm.time_step_rank": heads,
    }


def _bert_facts(config: Config) -> dict[str, Any]:
    return {"attention.layer_norm_epsilon": config["layer_norm_eps"], "attention.causal": False}


def _modern_facts(config: Config) -> dict[str, Any]:
    pooling = {"classifier.pooling_type": 1} if config.get("classifier_pooling") else {}
    return {
        **pooling,
        "attention.layer_norm_epsilon": config["norm_eps"],
        "attention.causal": False,
        "attention.sliding_window": config["local_attention"],
        "attention.sliding_window_pattern": config["global_attn_every_n_layers"],
        "rope.freq_base": config["global_rope_theta"],
        "rope.freq_base_swa": config["local_rope_theta"],
        "rope.scaling.type": "none",
        "hidden_activation": "gelu",
    }


_FACTS: dict[str, Callable[[Config], dict[str, Any]]] = {
    "granitehybrid": _granite_facts,
    "falcon-h1": _falcon_facts,
    "nemotron_h": _nemotron_facts,
    "nemotron_h_moe": _nemotron_facts,
    "qwen3next": _qwen_facts,
    "qwen35": _qwen_facts,
    "qwen35moe": _qwen_facts,
    "bert": _bert_facts,
    "modern-bert": _modern_facts,
    **FACTS,
}


def write_gguf(
    path: Path,
    architecture: str,
    config: Config,
    weights: Mapping[str, np.ndarray],
    facts: Mapping[str, Any] | None = None,
    in_blocks: tuple[str, ...] = (),
) -> None:
    """Write the file. `in_blocks`: roles whose tensors are stored as Q8_0; it must represent their values exactly."""
    tensors = {}
    for name, array in tensors_of(architecture, config, weights).items():
        is_packed = name.removesuffix(".weight").split(".")[-1] in in_blocks
        tensors[name] = _eight_bits(array) if is_packed else plain(array.astype(np.float32))
    path.write_bytes(gguf_bytes({**facts_of(architecture, config), **(facts or {})}, tensors))


def _eight_bits(array: np.ndarray) -> Stored:
    rows = (array * 64).reshape(-1, ELEMENTS[8])
    assert np.array_equal(rows, np.clip(np.rint(rows), -127, 127))
    return Stored(array.shape, 8, q8_0(np.full(len(rows), 1 / 64), rows))
