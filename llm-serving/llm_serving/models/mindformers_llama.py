"""What MindFormers' `LlamaForCausalLM` computes, and where it keeps a weight.

Read of MindFormers 2.1, which has the class of its releases before 2 as 1.9 has it. It makes queries, keys and values,
and both halves of a gate, by a product each.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Final

from llm_serving.network.description import Network
from llm_serving.network.operations import Weight
from llm_serving.network.primitives import lacking

ARCHITECTURE: Final = "LlamaForCausalLM"
_LAYER: Final = r"model\.layers\.(\d+)\."
_PLACES: Final = tuple(
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
    for pattern, place in _PLACES:
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
