"""What graphs of Cells have no operations for, so that a model is refused before a weight is read."""

from __future__ import annotations

from llm_serving.network.description import Network, Operation


def lacking_in_cells(network: Network) -> str | None:
    """What a network needs and no Cell computes; None where there is nothing."""
    for each in network.operations:
        if each.kind == "linear" and each.attributes["heads"] > 1:
            return "products with a weight for each head"
        if each.kind == "attend" and "q_turned" in each.inputs:
            return "attention to latent keys"
    return None


def lacking(network: Network, num_positions: int) -> str | None:
    """What a network needs and the primitives of Ascend do not have; None where they have everything.

    Args:
        network: The description.
        num_positions: Longest context that is served: a window of as many tokens is none.
    """
    attending = (each for each in network.operations if each.kind == "attend")
    in_attention = (_lacking_in_attention(each, num_positions) for each in attending)
    return lacking_in_cells(network) or next(filter(None, in_attention), None)


def _lacking_in_attention(operation: Operation, num_positions: int) -> str | None:
    if 0 < operation.attributes["window"] < num_positions:
        return f"attention with a window of {operation.attributes['window']} tokens"
    if operation.attributes["cap"]:
        return "attention with a cap on its scores"
    return "attention with slopes" if "slopes" in operation.weights else None
