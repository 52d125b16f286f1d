"""What graphs of Cells have no operations for, so that a model is refused before a weight is read."""

from __future__ import annotations

from typing import Final

from llm_serving.core.choices import QuantizationName
from llm_serving.network.coded import Quantization
from llm_serving.network.description import Network
from llm_serving.network.operations import Operation

_LATENT: Final = "attention to latent keys"


def lacking_in_cells(network: Network) -> str | None:
    """What a network needs and no Cell computes; None where there is nothing."""
    for each in network.operations:
        if each.kind == "linear" and each.attributes["heads"] > 1:
            return "products with a weight for each head"
        if _is_latent(each):
            return _LATENT
    return None


def lacking_of_codes(quantization: Quantization | None) -> str | None:
    """What weights that are kept so need and the primitives of Ascend do not have; None where they have everything."""
    if quantization is None or quantization.name == QuantizationName.W8A8:
        return None
    return f"products of {quantization.name} weights"


def lacking_in_coded_cache(network: Network) -> str | None:
    """What a network needs of keys and values that a cache of 8 bits has not; None where there is nothing."""
    return _LATENT if any(map(_is_latent, network.operations)) else None


def lacking(network: Network, num_positions: int) -> str | None:
    """What a network needs and the primitives of Ascend do not have; None where they have everything.

    Args:
        network: The description.
        num_positions: Longest context that is served: a window of as many tokens is none.
    """
    found = (_lacking_in(each, num_positions) for each in network.operations)
    return lacking_in_cells(network) or next(filter(None, found), None)


def _lacking_in(operation: Operation, num_positions: int) -> str | None:
    if operation.kind == "route" and not _is_softmax(operation):
        return "experts chosen by anything but the largest of a softmax"
    return _lacking_in_attention(operation, num_positions) if operation.kind == "attend" else None


def _is_latent(operation: Operation) -> bool:
    return operation.kind == "attend" and "q_turned" in operation.inputs


def _lacking_in_attention(operation: Operation, num_positions: int) -> str | None:
    if 0 < operation.attributes["window"] < num_positions:
        return f"attention with a window of {operation.attributes['window']} tokens"
    if operation.attributes["cap"]:
        return "attention with a cap on its scores"
    return "attention with slopes" if "slopes" in operation.weights else None


def _is_softmax(operation: Operation) -> bool:
    """Of `route`: MoeGatingTopKSoftmax chooses so."""
    attributes = operation.attributes
    return attributes["score"] == "softmax" and attributes["groups"] == 1 and "correction" not in operation.weights
