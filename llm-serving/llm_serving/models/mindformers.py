"""MindFormers models: conversion of their YAML to a config.json, and of weights to parameters of their classes.

In MindFormers 2.1, the supported version, all inference classes are one model, `GPTModel`, with options for each
family. Llama has no class there, so the Qwen2 class without biases computes it. `LlamaForCausalLM`, the class of
releases before 2, is still part of 2.1. It computes queries, keys, values, gate and up with a matrix product each.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from llm_serving.errors import ModelError, shorten
from llm_serving.formats.mindformers_names import mindformers_name
from llm_serving.models import chatglm
from llm_serving.models.config_reader import ConfigReader
from llm_serving.models.latent_attention import Transposed
from llm_serving.models.mindformers_latent import (
    is_of_latent_attention,
    latent_attentions,
    latent_parameter,
    unsupported_latent_attention,
    with_latent_weights,
)
from llm_serving.network.builder import Network
from llm_serving.network.operations import Operation, Weight
from llm_serving.network.quantization import unsupported_by_ascend

_FAMILIES: Final[Mapping[str, str]] = {
    "ChatGLM": chatglm.ARCHITECTURE,
    "Glm4For": "Glm4ForCausalLM",
    "Baichuan": "BaichuanForCausalLM",
    "InternLM3": "InternLM3ForCausalLM",
    "InternLM2": "InternLM2ForCausalLM",
    "Qwen3Moe": "Qwen3MoeForCausalLM",
    "Qwen3": "Qwen3ForCausalLM",
    "Qwen2": "Qwen2ForCausalLM",
}
_LIKE_LLAMA: Final = ("Llama", "Qwen", "InternLM")
"""Prefixes of classes that are a Llama or, with biases, a Qwen2."""
_EXTENSIONS: Final = ("None", "PI", "linear", "NTK", "YARN", "LLAMA3")

_TOKENS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")


def config_from_mindformers(config: Mapping[str, Any], network: str, where: str) -> dict[str, Any]:
    """Return the content of a config.json from `model.model_config` (`config`) and `model.arch.type` (`network`). Raise
    ModelError, which begins with `where`, if the network is not supported, or if a value is missing or invalid.
    """
    reader = ConfigReader(config, where)
    architecture = _architecture(reader, network)
    if architecture == chatglm.ARCHITECTURE:
        return {**config, "architectures": [architecture]}
    if reader.has("num_hidden_layers"):  # newer releases use Hugging Face's keys
        activation = {"hidden_act": "silu"} if config.get("hidden_act") == "swiglu" else {}
        return {**config, **activation, "architectures": [architecture]}
    return _of_llama(reader, architecture, network)


def _architecture(reader: ConfigReader, network: str) -> str:
    listed = reader.config.get("architectures")
    given = (network, *(listed if isinstance(listed, list) else ()), reader.config.get("type"))
    names = [
        name.removeprefix("Parallel").removeprefix("Inference") for name in given if name and isinstance(name, str)
    ]
    for name in names:
        for prefix, architecture in _FAMILIES.items():
            if name.startswith(prefix):
                return architecture
    if names and not names[0].startswith(_LIKE_LLAMA):
        known = ", ".join(sorted({*_LIKE_LLAMA, *_FAMILIES}))
        raise ModelError(
            f"{reader.where}: the network's class must start with one of {known}. Given: {shorten(names[0])}"
        )
    return "Qwen2ForCausalLM" if reader.boolean("qkv_has_bias") else "LlamaForCausalLM"


def _of_llama(reader: ConfigReader, architecture: str, network: str) -> dict[str, Any]:
    """Convert the keys of MindFormers' Llama and derived networks. `intermediate_size` is by default 2/3 of 4 times the
    hidden size, times `ffn_dim_multiplier` + 0.01, rounded up to a multiple of `multiple_of`.
    """
    heads = reader.integer("num_heads")
    hidden = reader.integer("hidden_size")
    intermediate = reader.integer("intermediate_size", 0, least=0)
    if not intermediate:
        multiple = reader.integer("multiple_of", 256)
        width = 4 * hidden
        if reader.has("ffn_dim_multiplier"):
            width = int((reader.number("ffn_dim_multiplier") + 0.01) * width)
        intermediate = multiple * math.ceil(int(2 * width / 3) / multiple)
    positions = "model_max_length" if network.startswith("Baichuan13B") else "max_position_embeddings"
    longest = reader.integer("max_position_embedding", reader.integer("seq_length", 2048))
    theta, scaling = _rotation(reader)
    if scaling.get("rope_type") == "linear":  # `longest` already contains the factor
        longest = max(1, int(longest / scaling["factor"]))
    return {
        "architectures": [architecture],
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": reader.integer("num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.integer("n_kv_heads", heads),
        "rms_norm_eps": reader.number("rms_norm_eps", 1e-5),
        "rope_theta": theta,
        **({"rope_scaling": scaling} if scaling else {}),
        "tie_word_embeddings": reader.boolean("tie_word_embeddings"),
        positions: longest,
        **{key: reader.config[key] for key in (*_TOKENS, "quantization_config") if reader.has(key)},
        **({"head_dim": reader.integer("head_dim")} if reader.has("head_dim") else {}),
        # InternLM 1 is a Llama with biases in attention.
        **({"attention_bias": True} if network.startswith("InternLMFor") else {}),
    }


def _rotation(reader: ConfigReader) -> tuple[float, dict[str, Any]]:
    theta = reader.number("theta", 10000.0)
    method = reader.choice("extend_method", _EXTENSIONS, "None")
    if method == "None":
        return theta, {}
    if method == "NTK":
        return theta * reader.number("scaling_factor", 1.0), {}
    if method == "PI":
        return theta, {"rope_type": "linear", "factor": reader.number("scaling_factor", 1.0)}
    inner = reader.inner("scaling_factor")
    return theta, {**inner.config, "rope_type": method.lower(), "factor": inner.number("factor")}


class MindFormersClass(NamedTuple):
    """A network class of MindFormers. Names of its modules contain `module`, and names of its classes `family`."""

    package: str
    module: str
    family: str
    config_arguments: Mapping[str, Any] = {}
    copied: tuple[str, ...] = ()
    """Keys of config.json that MindFormers' class reads as they are."""
    num_experts: str = "num_experts"
    """Argument for the number of experts."""

    @property
    def config(self) -> tuple[str, str]:
        """Module and name of the class for the configuration."""
        return f"mindformers.models.{self.package}.configuration_{self.module}", f"{self.family}Config"

    @property
    def network(self) -> tuple[str, str]:
        """Module and name of the class of the network."""
        module = f"mindformers.models.{self.package}.modeling_{self.module}_infer"
        return module, f"Inference{self.family}ForCausalLM"


_QWEN2: Final = MindFormersClass("qwen2", "qwen2", "Qwen2")
_WHOLE_HEADS_ROTATE: Final = {"partial_rotary_factor": 1.0, "rotary_cos_format": "rotate_half"}
"""Queries and keys arrive in the layout in which whole heads rotate; elements that do not rotate have cosine 1."""
_EXPERTS: Final = ("first_k_dense_replace", "n_shared_experts", "routed_scaling_factor")
MINDFORMERS_CLASSES: Final[Mapping[str, MindFormersClass]] = {
    "LlamaForCausalLM": _QWEN2,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": MindFormersClass("qwen3", "qwen3", "Qwen3"),
    "Qwen3MoeForCausalLM": MindFormersClass("qwen3_moe", "qwen3_moe", "Qwen3Moe"),
    "Glm4ForCausalLM": MindFormersClass("glm4", "glm4", "Glm4", _WHOLE_HEADS_ROTATE),
    "Glm4MoeForCausalLM": MindFormersClass(
        "glm4_moe",
        "glm4_moe",
        "Glm4Moe",
        {**_WHOLE_HEADS_ROTATE, "n_group": None, "topk_group": None},
        (*_EXPERTS, "use_qk_norm"),
        "n_routed_experts",
    ),
    "DeepseekV3ForCausalLM": MindFormersClass(
        "deepseek3",
        "deepseek_v3",
        "DeepseekV3",
        {"q_lora_rank": None, "rope_type": "rope", "n_group": None, "topk_group": None, "moe_router_fusion": False},
        (*_EXPERTS, "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        "n_routed_experts",
    ),
}
"""Name as in `models.registry.FAMILIES` -> the class that computes it."""

_LAYER: Final = r"model\.layers\.(\d+)\."
_WEIGHT_NAMES: Final = tuple(
    (re.compile(pattern), parameter)
    for pattern, parameter in (
        (r"model\.embed_tokens\.weight", "embedding.word_embeddings.weight"),
        (rf"{_LAYER}input_layernorm\.weight", r"decoder.layers.\1.input_layernorm.weight"),
        (rf"{_LAYER}self_attn\.q_proj\.(weight|bias)", r"decoder.layers.\1.self_attention.linear_qkv.\2"),
        (rf"{_LAYER}self_attn\.(q|kv)_a_layernorm\.weight", r"decoder.layers.\1.self_attention.\2_layernorm.weight"),
        (rf"{_LAYER}self_attn\.(q|k)_norm\.weight", r"decoder.layers.\1.self_attention.\2_layernorm.weight"),
        (rf"{_LAYER}self_attn\.o_proj\.weight", r"decoder.layers.\1.self_attention.linear_proj.weight"),
        (rf"{_LAYER}post_attention_layernorm\.weight", r"decoder.layers.\1.pre_mlp_layernorm.weight"),
        (rf"{_LAYER}post_(self_attn|mlp)_layernorm\.weight", r"decoder.layers.\1.post_\2_layernorm.weight"),
        (rf"{_LAYER}mlp\.(shared_experts\.)?gate(?:_up)?_proj\.weight", r"decoder.layers.\1.mlp.\2linear_fc1.weight"),
        (rf"{_LAYER}mlp\.(shared_experts\.)?down_proj\.weight", r"decoder.layers.\1.mlp.\2linear_fc2.weight"),
        (rf"{_LAYER}mlp\.gate\.weight", r"decoder.layers.\1.mlp.router.weight"),
        (rf"{_LAYER}mlp\.gate\.e_score_correction_bias", r"decoder.layers.\1.mlp.router.expert_bias"),
        (rf"{_LAYER}mlp\.experts\.0\.gate_proj\.weight", r"decoder.layers.\1.mlp.experts.linear_fc1.weight"),
        (rf"{_LAYER}mlp\.experts\.0\.down_proj\.weight", r"decoder.layers.\1.mlp.experts.linear_fc2.weight"),
        (r"model\.norm\.weight", "decoder.final_layernorm.weight"),
        (r"lm_head\.weight", "output_layer.weight"),
    )
)
"""Pattern of a weight's first tensor -> its parameter in a `GPTModel`, which stacks the same weights as `Network`."""


def mindformers_parameter(weight: Weight) -> str | None:
    """Return the parameter in MindFormers' class for a weight from `with_latent_weights`, or None if there is none."""
    matches = ((pattern.fullmatch(weight.names[0]), parameter) for pattern, parameter in _WEIGHT_NAMES)
    known = next((found.expand(parameter) for found, parameter in matches if found is not None), None)
    return latent_parameter(weight) or known


def _is_as_wide_as_stored(weight: Weight) -> bool:
    """Return whether a weight has only its tensors' values: no padding, and no transform but a transposition. Rows may
    be reordered, as for rotary tables. Experts may be padded: MindFormers' class is built with the padded size.
    """
    is_whole = all(order is None or min(order) >= 0 for order in (weight.rows, weight.columns))
    is_plain = weight.transform is None or isinstance(weight.transform, Transposed)
    return (is_whole or ".experts." in weight.names[0]) and is_plain


def without_key_offsets(network: Network) -> Network:
    """Return a network without the offsets of keys, which MindFormers' classes do not have."""
    operations = [
        dataclasses.replace(each, weights={role: weight for role, weight in each.weights.items() if role != "offset"})
        for each in network.operations
    ]
    return network.changed(operations=operations)


def _shared_with_native(network: Network) -> Network:
    """Return a network without its latent attention and routing operations: MindFormers' classes have their own."""
    others = [each for each in network.operations if each.kind != "route" and not is_of_latent_attention(each)]
    return network.changed(operations=others)


def _unsupported_routing(network: Network, *, is_fused: bool) -> str | None:
    """Return how MindFormers chooses experts differently, or None if it agrees. `is_fused`: it uses FusedAddTopKDiv."""
    counts = [each.attributes["experts"] for each in network.operations if each.kind == "experts"]
    routes = [each.attributes for each in network.operations if each.kind == "route"]
    for count, each in zip(counts, routes, strict=True):
        top_k, groups, top_groups = each["top_k"], each["groups"], each["top_groups"]
        if top_k == 1 and each["normalise"]:
            return "does not normalise the weight of a single expert"
        if top_groups == groups:
            continue
        if top_k // top_groups != 2:
            return f"scores a group of experts by its best {top_k // top_groups}, and the model by its best 2"
        if is_fused and not each["normalise"]:
            return "always normalises the weights of experts that it chooses in groups"
        if is_fused and count > 32 * (groups if groups == 8 else 1):
            return (
                f"chooses experts in 8 groups of at most 32, or at most 32 experts; the model has {count} in {groups}"
            )
    return None


def unsupported_by_mindformers(architecture: str, network: Network, num_positions: int) -> str | None:
    """Return what MindFormers' classes lack for a model with contexts of `num_positions` tokens, or None if nothing."""
    if architecture not in MINDFORMERS_CLASSES:
        return (
            f"{architecture} has no class of MindFormers 2.1 that is served; {', '.join(MINDFORMERS_CLASSES)} have one"
        )
    lacks = unsupported_by_ascend(_shared_with_native(network), num_positions)
    if lacks is not None:
        return f"MindFormers' class has no {lacks}"
    kinds = [operation.kind for operation in network.operations]
    has_other_layers = kinds.count("experts") not in (0, kinds.count("attention"))
    if has_other_layers and "first_k_dense_replace" not in MINDFORMERS_CLASSES[architecture].copied:
        return "MindFormers' class has no layers without experts"
    is_latent = bool(latent_attentions(network))
    lacks = _unsupported_routing(network, is_fused=is_latent)
    if lacks is None and is_latent:
        lacks = unsupported_latent_attention(network)
    if lacks is not None:
        return f"MindFormers' class {lacks}"
    for weight in with_latent_weights(without_key_offsets(network)).weights:
        if weight.generate is None and mindformers_parameter(weight) is None:
            return f"MindFormers' class has no parameter for {weight.names[0]}"
        if not _is_as_wide_as_stored(weight):
            return f"MindFormers' class takes heads as they are stored, of a multiple of 16 elements: {weight.names[0]}"
    return None


ARCHITECTURE: Final = "LlamaForCausalLM"


def mindformers_llama_parameter(name: str) -> str | None:
    """Return a tensor's parameter in MindFormers' `LlamaModel`, or None if it has none, as for the LM head."""
    theirs = mindformers_name(name)
    has_none = theirs == name or (".feed_forward." in theirs and not theirs.endswith(".weight"))
    return None if has_none else theirs.removeprefix("model.")


def split_stacked_weights(network: Network) -> Network:
    """Return a copy of the network in which each tensor of a stacked weight is a weight of its own. The copy serves to
    read the weights of MindFormers' `LlamaForCausalLM`, which does not stack them. It does not compute the model.
    """
    operations: list[Operation] = []
    for operation in without_key_offsets(network).operations:
        if all(len(weight.names) < 2 for weight in operation.weights.values()):
            operations.append(operation)
            continue
        for at in range(max(len(weight.names) for weight in operation.weights.values())):
            weights = {role: _part(weight, at) for role, weight in operation.weights.items()}
            operations.append(dataclasses.replace(operation, weights=weights))
    return network.changed(operations=operations)


def _part(weight: Weight, at: int) -> Weight:
    return Weight((weight.names[at],), weight.stored_shapes[at], (weight.stored_shapes[at],), dtype=weight.dtype)


def unsupported_by_mindformers_llama(architecture: str, network: Network, num_positions: int) -> str | None:
    if architecture != ARCHITECTURE:
        return f"{architecture} is none of MindFormers' classes before 2 that are served; {ARCHITECTURE} is"
    lacks = unsupported_by_ascend(network, num_positions)
    if lacks is not None:
        return f"MindFormers' {ARCHITECTURE} has no {lacks}"
    for operation in without_key_offsets(network).operations[:-1]:
        if operation.kind == "attention" and operation.inputs["q"].width != network.hidden:
            return f"MindFormers' {ARCHITECTURE} has heads that together are as wide as a row, {network.hidden}"
        for weight in operation.weights.values():
            is_as_stored = weight.rows is None and weight.columns is None and weight.transform is None
            missing = [name for name in weight.names if mindformers_llama_parameter(name) is None]
            if weight.generate is None and (missing or not is_as_stored):
                return f"MindFormers' {ARCHITECTURE} has no parameter for {(missing or weight.names)[0]}"
    return None
