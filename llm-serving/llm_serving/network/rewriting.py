"""Rules that shorten a list of operations, for any model family, without changing a bit of its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from llm_serving.formats.block_tensor import PANEL_ROWS
from llm_serving.network.operations import Operation, Value, Weight

Operations = list[Operation]

_ROW_BY_ROW: Final = frozenset(
    {
        "linear",
        "rms_norm",
        "gated_activation",
        "activation",
        "add",
        "multiply",
        "sigmoid_gate",
        "route",
        "experts",
        "lm_head",
        "hidden_states",
        "all_reduce",
        "mix_streams",
        "match_streams",
        "sparsify",
    }
)
"""Operations whose output row depends only on the same row of the input."""


@dataclass(frozen=True)
class Plan:
    """Operations in execution order. `selected`: values that have rows only for the sampled tokens of a step."""

    operations: Operations
    selected: frozenset[Value]


def select_rows(operations: Sequence[Operation]) -> Plan:
    """Return a plan whose operations compute only the sampled rows as soon as no later operation reads other rows."""
    every_row: set[Value] = set()
    few: set[Operation] = set()
    for operation in reversed(operations):
        if operation.kind in _ROW_BY_ROW and every_row.isdisjoint(operation.outputs.values()):
            few.add(operation)
        else:
            every_row |= {x.root for x in operation.inputs.values()}
    selected = {y for operation in few for y in operation.outputs.values()}
    result: Operations = []
    copies: dict[Value, Value] = {}
    for operation in operations:
        if operation in few:
            for x in {each.root: None for each in operation.inputs.values() if each.root not in selected}:
                if x not in copies:
                    copies[x] = replace(x, name=f"{x.name}.selected")
                    result.append(Operation("select_rows", {"x": x}, {}, {"y": copies[x]}, {}))
            moved = {
                role: x if x.root in selected else _view_of(copies[x.root], x) for role, x in operation.inputs.items()
            }
            operation = operation.changed(inputs=moved)
        result.append(operation)
    return Plan(result, frozenset(selected | set(copies.values())))


def rewrite(plan: Plan) -> Plan:
    return apply(plan, RULES)


def apply(plan: Plan, rules: Sequence[Rule]) -> Plan:
    operations = plan.operations
    for rule in rules:
        while changes := _changes(rule, operations):
            changed = [changes.get(each, each) for each in operations]
            operations = [each for each in changed if each is not None]
    return Plan(operations, plan.selected)


class Graph:
    def __init__(self, operations: Sequence[Operation]) -> None:
        self.position = {operation: at for at, operation in enumerate(operations)}
        self._stores: dict[Operation, Operation] = {}
        latest: dict[int, Operation] = {}
        for each in operations:
            if each.kind == "store_kv" or (each.kind == "attention" and "k" in each.inputs):
                latest[each.attributes["layer"]] = each
            elif each.kind == "attention":
                self._stores[each] = latest[each.attributes["layer"]]
        self._producers = {y: each for each in operations for y in each.outputs.values()}
        self._consumers: dict[Value, list[Operation]] = {}
        for each in operations:
            for x in each.inputs.values():
                self._consumers.setdefault(x.root, []).append(each)

    def store_of(self, attention: Operation) -> Operation:
        """Return the operation that stores the keys which `attention` reads: store_kv or a fused attention."""
        return self._stores[attention]

    def producer(self, value: Value) -> Operation | None:
        return self._producers.get(value)

    def consumers(self, value: Value) -> list[Operation]:
        return self._consumers.get(value.root, [])

    def single_use_producer(self, value: Value, *kinds: str) -> Operation | None:
        producer = self.producer(value)
        return producer if producer is not None and producer.kind in kinds and len(self.consumers(value)) == 1 else None


Changes = dict[Operation, Operation | None]


def fuse_gate(graph: Graph, operation: Operation) -> Changes:
    """Return the changes that make gated_activation(linear(x)) one linear operation with a gated result, or {}."""
    if operation.kind != "gated_activation" or operation.outputs["y"].width % PANEL_ROWS:
        return {}
    product = graph.single_use_producer(operation.inputs["x"], "linear")
    if product is None or product.attributes["heads"] > 1:
        return {}
    return {product: None, operation: product.changed(outputs=operation.outputs, attributes=operation.attributes)}


def fuse_residual(graph: Graph, operation: Operation) -> Changes:
    """Return the changes that make a + scale * linear(x), or a + scale * experts(x), one operation, or {}."""
    if operation.kind != "add":
        return {}
    product = graph.single_use_producer(operation.inputs["b"], "linear", "experts")
    if product is None or "residual" in product.inputs or product.attributes.get("heads", 1) > 1:
        return {}
    if product.kind == "linear" and product.attributes["function"]:
        return {}
    inputs = {"residual": operation.inputs["a"]}
    added = product.changed(inputs=inputs, outputs=operation.outputs, attributes=operation.attributes)
    return {product: None, operation: added}


def fuse_residual_into_norm(graph: Graph, operation: Operation) -> Changes:
    """Return the changes that fuse a + b and its rms_norm, or {} if another operation reads the sum before the norm."""
    if operation.kind != "rms_norm" or "residual" in operation.inputs or operation.attributes["group"]:
        return {}
    total = graph.producer(operation.inputs["x"])
    if total is None or total.kind != "add" or total.attributes["scale"] != 1:
        return {}
    if any(graph.position[each] < graph.position[operation] for each in graph.consumers(operation.inputs["x"])):
        return {}
    inputs = {"x": total.inputs["a"], "residual": total.inputs["b"]}
    return {total: None, operation: operation.changed(inputs=inputs, outputs={"residual_out": total.outputs["y"]})}


def fuse_attention(graph: Graph, operation: Operation) -> Changes:
    """Return the changes that make head norms, rotary embedding, store_kv and attention one operation, or {}."""
    if operation.kind != "attention" or "k" in operation.inputs or "q_rope" in operation.inputs:
        return {}
    store = graph.store_of(operation)
    if store.kind != "store_kv":
        return {}  # the attention of an earlier layer stores the keys
    q, k = operation.inputs["q"], store.inputs["k"]
    changes: Changes = {store: None}
    weights: dict[str, Weight] = {}
    eps = 0.0
    for kind in ("rope", "rms_norm"):
        first, second = (graph.single_use_producer(each, kind) for each in (q, k))
        if first is None or second is None:
            continue
        if kind == "rope" and first.weights.items() <= second.weights.items():
            weights |= {f"k_{role}" if role in ("bias", "offset") else role: w for role, w in second.weights.items()}
        elif kind == "rms_norm" and _is_head_norm(first) and first.attributes == second.attributes:
            weights |= {"q_gamma": first.weights["gamma"], "k_gamma": second.weights["gamma"]}
            eps = first.attributes["eps"]
        else:
            continue
        q, k = first.inputs["x"], second.inputs["x"]
        changes |= {first: None, second: None}
    inputs = {"q": q, "k": k, "v": store.inputs["v"]}
    return {**changes, operation: operation.changed(inputs=inputs, weights=weights, attributes={"eps": eps})}


def _is_head_norm(norm: Operation) -> bool:
    group = norm.attributes["group"]
    return group > 0 and not norm.attributes["centred"] and norm.weights["gamma"].shape == (group,)


def tile_for_consumer(graph: Graph, operation: Operation) -> Changes:
    """Return the changes that store a value in the tiled layout of the only product that reads it, or {}."""
    if operation.kind not in ("rms_norm", "linear", "attention") or "consumer" in operation.weights:
        return {}
    is_gate = operation.kind != "linear" or operation.attributes["function"]
    if not is_gate or (operation.kind == "rms_norm" and operation.attributes["group"]):
        return {}
    if "selected" in operation.inputs:
        return {}
    y = operation.outputs["y"]
    consumers = graph.consumers(y)
    if len(consumers) != 1 or consumers[0].kind not in ("linear", "lm_head") or consumers[0].inputs["x"] is not y:
        return {}
    (consumer,) = consumers
    if consumer.attributes.get("heads", 1) > 1:
        return {}
    # The producer refers to the consumer's weight, which determines the layout. Both share one parameter.
    return {
        operation: operation.changed(weights={"consumer": consumer.weights["weight"]}),
        consumer: consumer.changed(attributes={"tiled": True}),
    }


Rule = Callable[[Graph, Operation], Changes]
RULES: Final[tuple[Rule, ...]] = (fuse_gate, fuse_residual, fuse_residual_into_norm, fuse_attention, tile_for_consumer)


def _changes(rule: Rule, operations: Sequence[Operation]) -> Changes:
    graph, changes = Graph(operations), Changes()
    for operation in operations:
        change = rule(graph, operation)
        if changes.keys().isdisjoint(change):
            changes |= change
    return changes


def _view_of(root: Value, x: Value) -> Value:
    return root if x.base is None else replace(x, base=root)
