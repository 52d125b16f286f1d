"""The GGUF metadata of Gemma 1 to 4 and 3n."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Final

from llm_serving.errors import ModelError
from llm_serving.formats.gguf_weights import FREQUENCIES
from llm_serving.models.gguf_metadata import Architecture, Config, MetadataReader
from llm_serving.models.layers import FULL, SLIDING

WINDOW: Final[Mapping[str, str]] = {"attention.sliding_window": "sliding_window"}
_CAP: Final[Mapping[str, str]] = {"final_logit_softcapping": "final_logit_softcapping"}
_LATER: Final[Mapping[str, str]] = {
    **WINDOW,
    **_CAP,
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
}
_UNROTATED: Final = 1e29
"""Divisors of frequencies above this number mean that an element of a head is not rotated."""


def set_layer_windows(reader: MetadataReader, config: Config) -> None:
    if (slides := reader.of_layers("attention.sliding_window_pattern")) is not None:
        config["layer_types"] = [SLIDING if each else FULL for each in slides]


def _gemma(reader: MetadataReader, config: Config) -> None:
    """Set `query_pre_attn_scalar`: the size of a head, or `hidden_size` / heads in the largest Gemma 2 and 3."""
    largest = {"gemma2": 46, "gemma3": 62}[reader.architecture]
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    own = config.get("head_dim", hidden // heads)
    config["query_pre_attn_scalar"] = hidden // heads if config["num_hidden_layers"] == largest else own
    if reader.architecture == "gemma2":
        return
    config.setdefault("rope_local_base_freq", 10000.0)
    config.setdefault("sliding_window_pattern", 6 if config.get("sliding_window") else 1)


def _set_rows(reader: MetadataReader, config: Config) -> None:
    rows = {"vocab_size_per_layer_input": "per_layer_token_embd", "laurel_rank": "blk.0.laurel_l"}
    for key, name in rows.items():
        if (tensor := reader.found.tensors.get(f"{name}.weight")) is not None:
            config[key] = tensor.shape[0]


def _gemma3n(reader: MetadataReader, config: Config) -> None:
    set_layer_windows(reader, config)
    _set_rows(reader, config)
    if widths := reader.numbers("feed_forward_length"):
        config["intermediate_size"] = widths
    if (scales := reader.of_layers("activation_sparsity_scale")) is not None:
        # The file has quantiles of the normal distribution; a config.json has their probabilities.
        config["activation_sparsity_pattern"] = [round(NormalDist().cdf(each), 6) for each in scales]


def _gemma4(reader: MetadataReader, config: Config) -> None:
    set_layer_windows(reader, config)
    _set_rows(reader, config)
    kinds = config.get("layer_types", [])
    if len(kinds) != config["num_hidden_layers"]:
        raise reader.fail(reader.key("attention.sliding_window_pattern"), "must be a list with a flag for each layer")
    if widths := reader.numbers("feed_forward_length"):
        config |= {"intermediate_size": min(widths), "use_double_wide_mlp": max(widths) > min(widths)}
    if counts := reader.numbers("attention.head_count_kv"):
        of_kinds = dict(zip(kinds, counts, strict=False))
        config["num_key_value_heads"] = of_kinds.get(SLIDING)
        config["num_global_key_value_heads"] = of_kinds.get(FULL)
    config["global_head_dim"] = reader.positive("attention.key_length")
    config["head_dim"] = reader.positive("attention.key_length_swa")
    first = kinds.index(FULL) if FULL in kinds else 0
    config["attention_k_eq_v"] = not reader.has_tensor(f"blk.{first}.attn_v.weight")
    config["enable_moe_block"] = bool(reader.own("expert_count"))
    divisors = config.pop("rope_scaling", {}).get("long_factor")
    if divisors is None:
        raise ModelError(f"{reader.found.file}: must have a tensor {FREQUENCIES}")
    rotated = sum(each < _UNROTATED for each in divisors) / len(divisors)
    full = {"rope_type": "proportional", "partial_rotary_factor": rotated, "rope_theta": config["rope_theta"]}
    sliding = {"rope_type": "default", "rope_theta": reader.own("rope.freq_base_swa") or 10000.0}
    config["rope_parameters"] = {FULL: full, SLIDING: sliding}


GEMMA: Final[Mapping[str, Architecture]] = {
    "gemma": Architecture("GemmaForCausalLM"),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", {**WINDOW, **_CAP, "attn_logit_softcapping": "attn_logit_softcapping"}, complete=_gemma
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        {
            **WINDOW,
            **_CAP,
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        complete=_gemma,
    ),
    "gemma3n": Architecture(
        "Gemma3nForCausalLM",
        {**_LATER, "altup.active_idx": "altup_active_idx", "altup.num_inputs": "altup_num_inputs"},
        complete=_gemma3n,
        has_lists=True,
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM",
        {
            **_LATER,
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        fixed={"separate_experts": True},
        complete=_gemma4,
        has_lists=True,
    ),
}
