"""What `model.model_config` of a MindFormers YAML says, in the words of a Hugging Face configuration.

What MindFormers' own classes compute, and where each of them keeps a weight.

Read of MindFormers 2.1: its classes for inference are one model, `GPTModel`, built in the way of each family. A Llama
is a Qwen2 without biases, and 2.1 has no other class for it. Classes with experts or latent keys are made of operators
that the operator library does not have.

What MindFormers' `LlamaForCausalLM` computes, and where it keeps a weight.

Read of MindFormers 2.1, which has the class of its releases before 2 as 1.9 has it. It makes queries, keys and values,
and both halves of a gate, by a product each.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from llm_serving.errors import ModelError, shorten
from llm_serving.models import chatglm
from llm_serving.models.model_config import Facts
from llm_serving.network.builder import Network
from llm_serving.network.operations import Weight
from llm_serving.network.quantization import lacking

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
"""How the class of a network there begins -> what serves it."""
_LIKE_LLAMA: Final = ("Llama", "Qwen", "InternLM")
"""Beginnings of those that are a Llama, or with biases a Qwen2."""
_EXTENSIONS: Final = ("None", "PI", "linear", "NTK", "YARN", "LLAMA3")

_TOKENS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")


def hugging_face_config(config: Mapping[str, Any], network: str, where: str) -> dict[str, Any]:
    """The content of a config.json.

    Args:
        config: `model.model_config`.
        network: `model.arch.type`, or an empty text.
        where: Names the file in errors.

    Raises:
        ModelError: The network is none of these, or a fact is missing or out of its range.
    """
    facts = Facts(config, where)
    architecture = _architecture(facts, network)
    if architecture == chatglm.ARCHITECTURE:
        return {**config, "architectures": [architecture]}
    if facts.has("num_hidden_layers"):  # newer releases have the facts as Hugging Face names them
        activation = {"hidden_act": "silu"} if config.get("hidden_act") == "swiglu" else {}
        return {**config, **activation, "architectures": [architecture]}
    return _of_llama(facts, architecture, network)


def _architecture(facts: Facts, network: str) -> str:
    listed = facts.config.get("architectures")
    given = (network, *(listed if isinstance(listed, list) else ()), facts.config.get("type"))
    names = [
        name.removeprefix("Parallel").removeprefix("Inference") for name in given if name and isinstance(name, str)
    ]
    for name in names:
        for beginning, architecture in _FAMILIES.items():
            if name.startswith(beginning):
                return architecture
    if names and not names[0].startswith(_LIKE_LLAMA):
        known = ", ".join(sorted({*_LIKE_LLAMA, *_FAMILIES}))
        raise ModelError(
            f"{facts.where}: the network's class must begin with one of {known}. Given: {shorten(names[0])}"
        )
    return "Qwen2ForCausalLM" if facts.boolean("qkv_has_bias") else "LlamaForCausalLM"


def _of_llama(facts: Facts, architecture: str, network: str) -> dict[str, Any]:
    """Facts of the kind that MindFormers' Llama has, and the networks made from it.

    It leaves `intermediate_size` out for the first Llama models: it follows from the rule of its code, two thirds of
    four times the width, before that times `ffn_dim_multiplier` and a hundredth, rounded up to `multiple_of`.
    """
    heads = facts.integer("num_heads")
    hidden = facts.integer("hidden_size")
    intermediate = facts.integer("intermediate_size", 0, least=0)
    if not intermediate:
        multiple = facts.integer("multiple_of", 256)
        width = 4 * hidden
        if facts.has("ffn_dim_multiplier"):
            width = int((facts.number("ffn_dim_multiplier") + 0.01) * width)
        intermediate = multiple * math.ceil(int(2 * width / 3) / multiple)
    positions = "model_max_length" if network.startswith("Baichuan13B") else "max_position_embeddings"
    longest = facts.integer("max_position_embedding", facts.integer("seq_length", 2048))
    theta, scaling = _rotation(facts)
    if scaling.get("rope_type") == "linear":  # here that is the stretched number
        longest = max(1, int(longest / scaling["factor"]))
    return {
        "architectures": [architecture],
        "vocab_size": facts.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": facts.integer("num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.integer("n_kv_heads", heads),
        "rms_norm_eps": facts.number("rms_norm_eps", 1e-5),
        "rope_theta": theta,
        **({"rope_scaling": scaling} if scaling else {}),
        "tie_word_embeddings": facts.boolean("tie_word_embeddings"),
        positions: longest,
        **{key: facts.config[key] for key in (*_TOKENS, "quantization_config") if facts.has(key)},
        **({"head_dim": facts.integer("head_dim")} if facts.has("head_dim") else {}),
        # The first InternLM is a Llama with biases in attention.
        **({"attention_bias": True} if network.startswith("InternLMFor") else {}),
    }


def _rotation(facts: Facts) -> tuple[float, dict[str, Any]]:
    """Base of the frequencies, and how they are stretched: by `extend_method` with its `scaling_factor`."""
    theta = facts.number("theta", 10000.0)
    method = facts.choice("extend_method", _EXTENSIONS, "None")
    if method == "None":
        return theta, {}
    if method == "NTK":
        return theta * facts.number("scaling_factor", 1.0), {}
    if method == "PI":
        return theta, {"rope_type": "linear", "factor": facts.number("scaling_factor", 1.0)}
    inner = facts.inner("scaling_factor")
    return theta, {**inner.config, "rope_type": method.lower(), "factor": inner.number("factor")}


class MindFormersClass(NamedTuple):
    """Two classes of MindFormers, each behind the module it is in."""

    config_module: str
    config: str
    module: str
    network: str
    facts: Mapping[str, Any] = {}
    """Arguments of its configuration beside those that all have."""


_QWEN2: Final = MindFormersClass(
    "mindformers.models.qwen2.configuration_qwen2",
    "Qwen2Config",
    "mindformers.models.qwen2.modeling_qwen2_infer",
    "InferenceQwen2ForCausalLM",
)
_QWEN3: Final = MindFormersClass(
    "mindformers.models.qwen3.configuration_qwen3",
    "Qwen3Config",
    "mindformers.models.qwen3.modeling_qwen3_infer",
    "InferenceQwen3ForCausalLM",
)
_GLM4: Final = MindFormersClass(
    "mindformers.models.glm4.configuration_glm4",
    "Glm4Config",
    "mindformers.models.glm4.modeling_glm4_infer",
    "InferenceGlm4ForCausalLM",
    # Queries and keys come in the order in which whole heads turn; what does not turn has a cosine of 1.
    {"partial_rotary_factor": 1.0, "rotary_cos_format": "rotate_half"},
)
CLASSES: Final[Mapping[str, MindFormersClass]] = {
    "LlamaForCausalLM": _QWEN2,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Glm4ForCausalLM": _GLM4,
}
"""Name as in `models.registry.FAMILIES` -> the class that computes it."""

_LAYER: Final = r"model\.layers\.(\d+)\."
_WEIGHT_NAMES: Final = tuple(
    (re.compile(pattern), place)
    for pattern, place in (
        (r"model\.embed_tokens\.weight", "embedding.word_embeddings.weight"),
        (rf"{_LAYER}input_layernorm\.weight", r"decoder.layers.\1.input_layernorm.weight"),
        (rf"{_LAYER}self_attn\.q_proj\.(weight|bias)", r"decoder.layers.\1.self_attention.linear_qkv.\2"),
        (rf"{_LAYER}self_attn\.(q|k)_norm\.weight", r"decoder.layers.\1.self_attention.\2_layernorm.weight"),
        (rf"{_LAYER}self_attn\.o_proj\.weight", r"decoder.layers.\1.self_attention.linear_proj.weight"),
        (rf"{_LAYER}post_attention_layernorm\.weight", r"decoder.layers.\1.pre_mlp_layernorm.weight"),
        (rf"{_LAYER}post_(self_attn|mlp)_layernorm\.weight", r"decoder.layers.\1.post_\2_layernorm.weight"),
        (rf"{_LAYER}mlp\.gate(?:_up)?_proj\.weight", r"decoder.layers.\1.mlp.linear_fc1.weight"),
        (rf"{_LAYER}mlp\.down_proj\.weight", r"decoder.layers.\1.mlp.linear_fc2.weight"),
        (r"model\.norm\.weight", "decoder.final_layernorm.weight"),
        (r"lm_head\.weight", "output_layer.weight"),
    )
)
"""First tensor of a weight -> its place in a `GPTModel`, which stacks queries, keys and values, and both halves of a
gate, as the description does."""


def place_of(weight: Weight) -> str | None:
    """Where a `GPTModel` keeps a weight that is read from a folder; None where it has no place."""
    for pattern, place in _WEIGHT_NAMES:
        if (found := pattern.fullmatch(weight.names[0])) is not None:
            return found.expand(place)
    return None


def _is_as_wide_as_stored(weight: Weight) -> bool:
    """Another order is that of our tables of cosines and sines, which take the place of those of the class."""
    is_whole = all(order is None or min(order) >= 0 for order in (weight.rows, weight.columns))
    return is_whole and weight.change is None


def lacking_in_mindformers(architecture: str, network: Network, num_positions: int) -> str | None:
    """What a model needs and no class of MindFormers computes here; None where one computes all of it.

    Args:
        architecture: Name of the family.
        network: Its description.
        num_positions: Longest context that is served.
    """
    if architecture not in CLASSES:
        return f"{architecture} has no class of MindFormers 2.1 that is served; {', '.join(CLASSES)} have one"
    lacks = lacking(network, num_positions)
    if lacks is not None:
        return f"MindFormers' class has no {lacks}"
    for weight in network.weights:
        if weight.made is None and place_of(weight) is None:
            return f"MindFormers' class has no place for {weight.names[0]}"
        if not _is_as_wide_as_stored(weight):
            return f"MindFormers' class takes heads as they are stored, of a multiple of 16 elements: {weight.names[0]}"
    return None


ARCHITECTURE: Final = "LlamaForCausalLM"

_LEGACY_WEIGHT_NAMES: Final = tuple(
    (re.compile(pattern), place)
    for pattern, place in (
        (r"model\.embed_tokens\.weight", "tok_embeddings.embedding_weight"),
        (rf"{_LAYER}input_layernorm\.weight", r"layers.\1.attention_norm.weight"),
        (rf"{_LAYER}self_attn\.([qkvo])_proj\.(weight|bias)", r"layers.\1.attention.w\2.\3"),
        (rf"{_LAYER}post_attention_layernorm\.weight", r"layers.\1.ffn_norm.weight"),
        (rf"{_LAYER}mlp\.gate_proj\.weight", r"layers.\1.feed_forward.w1.weight"),
        (rf"{_LAYER}mlp\.down_proj\.weight", r"layers.\1.feed_forward.w2.weight"),
        (rf"{_LAYER}mlp\.up_proj\.weight", r"layers.\1.feed_forward.w3.weight"),
        (r"model\.norm\.weight", "norm_out.weight"),
    )
)
"""Tensor -> its place in a `LlamaModel`."""


def place_in_llama(name: str) -> str | None:
    """Where a `LlamaModel` keeps a tensor; None where it has no place, as for the head."""
    for pattern, place in _LEGACY_WEIGHT_NAMES:
        if (found := pattern.fullmatch(name)) is not None:
            return found.expand(place)
    return None


def unstacked(network: Network) -> Network:
    """A network with the tensors of `network`, each a weight of its own; it is read, and not run."""
    apart = copy.copy(network)
    apart.operations = []
    for operation in network.operations:
        if all(len(weight.names) < 2 for weight in operation.weights.values()):
            apart.operations.append(operation)
            continue
        for at in range(max(len(weight.names) for weight in operation.weights.values())):
            weights = {role: _part(weight, at) for role, weight in operation.weights.items()}
            apart.operations.append(dataclasses.replace(operation, weights=weights))
    return apart


def _part(weight: Weight, at: int) -> Weight:
    return Weight((weight.names[at],), weight.stored[at], (weight.stored[at],), kind=weight.kind)


def lacking_in_llama(architecture: str, network: Network, num_positions: int) -> str | None:
    """What a model needs and the class does not compute here; None where it computes all of it.

    Args:
        architecture: Name of the family.
        network: Its description.
        num_positions: Longest context that is served.
    """
    if architecture != ARCHITECTURE:
        return f"{architecture} is none of MindFormers' classes before 2 that are served; {ARCHITECTURE} is"
    lacks = lacking(network, num_positions)
    if lacks is not None:
        return f"MindFormers' {ARCHITECTURE} has no {lacks}"
    for operation in network.operations[:-1]:
        if operation.kind == "attend" and operation.inputs["q"].width != network.hidden:
            return f"MindFormers' {ARCHITECTURE} has heads that together are as wide as a row, {network.hidden}"
        for weight in operation.weights.values():
            is_as_stored = weight.rows is None and weight.columns is None and weight.change is None
            missing = [name for name in weight.names if place_in_llama(name) is None]
            if weight.made is None and (missing or not is_as_stored):
                return f"MindFormers' {ARCHITECTURE} has no place for {(missing or weight.names)[0]}"
    return None
