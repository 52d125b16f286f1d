"""What MindFormers' own classes compute, and where each of them keeps a weight.

Read of MindFormers 2.1: its classes for inference are one model, `GPTModel`, built in the way of each family. A Llama
is a Qwen2 without biases, and 2.1 has no other class for it. Classes with experts or latent keys are made of operators
that the operator library does not have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from llm_serving.network.description import Network
from llm_serving.network.operations import Weight
from llm_serving.network.primitives import lacking


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
_PLACES: Final = tuple(
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
    for pattern, place in _PLACES:
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
