"""What the primitives of Ascend have no operator for, so that a model is refused before a weight is read."""

from __future__ import annotations

from llm_serving.network.description import Network


def lacking(network: Network, num_positions: int) -> str | None:
    """What a network needs and they do not have; None where they have everything.

    Args:
        network: The description.
        num_positions: Longest context that is served: a window of as many tokens is none.
    """
    for each in network.operations:
        if each.kind == "linear" and each.attributes["heads"] > 1:
            return "products with a weight for each head"
        if each.kind != "attend":
            continue
        if "q_turned" in each.inputs:
            return "attention to latent keys"
        if 0 < each.attributes["window"] < num_positions:
            return f"attention with a window of {each.attributes['window']} tokens"
        if each.attributes["cap"]:
            return "attention with a cap on its scores"
        if "slopes" in each.weights:
            return "attention with slopes"
    return None
