"""Moves the bias of keys from the linear operation to the rotary embedding, so that keys are not rounded while they
include a large bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llm_serving.network.operations import Operation, Value, Weight
from llm_serving.network.weights import shared_order, with_rows


def move_key_biases(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations, with the key bias moved from `linear` to each `rope` that has an offset.

    In some models this bias is far larger than the differences between keys. Rounding the sum, before the offset is
    subtracted, would lose most of these differences.
    """
    producers = {y: each for each in operations for y in each.outputs.values()}
    changes: dict[Operation, Operation] = {}
    for rope in operations:
        if rope.kind == "rope" and "offset" in rope.weights:
            product = producers[rope.inputs["x"].root]
            changes[product], bias = without_bias(product, rope.inputs["x"])
            changes[rope] = rope.changed(weights={"bias": replace(bias, dtype="float32")})
    return [changes.get(each, each) for each in operations]


def without_bias(product: Operation, x: Value) -> tuple[Operation, Weight]:
    """Return `product` with a zero bias in the columns that `x` views, and the bias of these columns as a weight."""
    bias = product.weights["bias"]
    columns = range(x.start, x.start + x.width)
    others = tuple(-1 if column in columns else column for column in range(bias.shape[0]))
    changed = product.changed(weights={"bias": with_rows(bias, shared_order(others))})
    return changed, with_rows(bias, shared_order(tuple(columns)))
