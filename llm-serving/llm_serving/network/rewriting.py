"""Rules that turn a list of operations into a shorter one that gives the same bits. None knows a family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from llm_serving.network.builder import PANEL
from llm_serving.network.operations import Operation, Value, Weight

Operations = list[Operation]

_ROW_BY_ROW: Final = frozenset(
    {"linear", "norm", "activate", "add", "weigh", "route", "experts", "output", "states", "all_reduce"}
)
"""What computes a row from that row alone."""


@dataclass(frozen=True)
class Plan:
    """Operations, and the values that have the selected rows of a step only.

    Attributes:
        operations: In the order in which they run.
        selected: Whole values, no views.
    """

    operations: Operations
    selected: frozenset[Value]


def select_rows(operations: Sequence[Operation]) -> Plan:
    """Logits are wanted of some rows: leaves the others out as soon as nothing reads them any more."""
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
                    result.append(Operation("select", {"x": x}, {}, {"y": copies[x]}, {}))
            moved = {
                role: x if x.root in selected else _view_of(copies[x.root], x) for role, x in operation.inputs.items()
            }
            operation = operation.changed(inputs=moved)
        result.append(operation)
    return Plan(result, frozenset(selected | set(copies.values())))


def rewrite(plan: Plan) -> Plan:
    """Applies every rule wherever it fits, one rule after the other."""
    return apply(plan, RULES)


def apply(plan: Plan, rules: Sequence[Rule]) -> Plan:
    """As `rewrite`, with some of the rules."""
    operations = plan.operations
    for rule in rules:
        while changes := _changes(rule, operations):
            changed = [changes.get(each, each) for each in operations]
            operations = [each for each in changed if each is not None]
    return Plan(operations, plan.selected)


class Graph:
    """Who writes and who reads each value of a list of operations."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.position = {operation: at for at, operation in enumerate(operations)}
        self.stores = {each.attributes["layer"]: each for each in operations if each.kind == "store"}
        self._writers = {y: each for each in operations for y in each.outputs.values()}
        self._readers: dict[Value, list[Operation]] = {}
        for each in operations:
            for x in each.inputs.values():
                self._readers.setdefault(x.root, []).append(each)

    def writer(self, value: Value) -> Operation | None:
        """What writes the whole of a value; None for a view."""
        return self._writers.get(value)

    def readers(self, value: Value) -> list[Operation]:
        """What reads a value or views of it, once for each time."""
        return self._readers.get(value.root, [])

    def writer_for_one(self, value: Value, *kinds: str) -> Operation | None:
        """What writes a value that is read once, if it is of one of these kinds."""
        writer = self.writer(value)
        return writer if writer is not None and writer.kind in kinds and len(self.readers(value)) == 1 else None


Changes = dict[Operation, Operation | None]
"""Operation -> what takes its place; None: nothing does."""


def gate_in_product(graph: Graph, operation: Operation) -> Changes:
    """activate(linear(x)) -> a product that gates its own result."""
    if operation.kind != "activate" or operation.outputs["y"].width % PANEL:
        return {}
    product = graph.writer_for_one(operation.inputs["x"], "linear")
    if product is None or product.attributes["heads"] > 1:
        return {}
    return {product: None, operation: product.changed(outputs=operation.outputs, attributes=operation.attributes)}


def add_in_product(graph: Graph, operation: Operation) -> Changes:
    """a + scale * linear(x), or the same of experts -> a product that is added to a."""
    if operation.kind != "add":
        return {}
    product = graph.writer_for_one(operation.inputs["b"], "linear", "experts")
    if product is None or "added" in product.inputs or product.attributes.get("heads", 1) > 1:
        return {}
    if product.kind == "linear" and product.attributes["function"]:
        return {}
    inputs = {"added": operation.inputs["a"]}
    added = product.changed(inputs=inputs, outputs=operation.outputs, attributes=operation.attributes)
    return {product: None, operation: added}


def add_in_norm(graph: Graph, operation: Operation) -> Changes:
    """norm(a + b) -> a norm that writes the sum too, if nothing reads the sum before."""
    if operation.kind != "norm" or "added" in operation.inputs or operation.attributes["group"]:
        return {}
    total = graph.writer(operation.inputs["x"])
    if total is None or total.kind != "add" or total.attributes["scale"] != 1:
        return {}
    if any(graph.position[each] < graph.position[operation] for each in graph.readers(operation.inputs["x"])):
        return {}
    inputs = {"x": total.inputs["a"], "added": total.inputs["b"]}
    return {total: None, operation: operation.changed(inputs=inputs, outputs={"sum": total.outputs["y"]})}


def attend_together(graph: Graph, operation: Operation) -> Changes:
    """Norms of heads, rotation, storing and attention -> one operation of query, key and value."""
    if operation.kind != "attend" or "k" in operation.inputs or "q_turned" in operation.inputs:
        return {}
    store = graph.stores[operation.attributes["layer"]]
    q, k = operation.inputs["q"], store.inputs["k"]
    changes: Changes = {store: None}
    weights: dict[str, Weight] = {}
    eps = 0.0
    for kind in ("rotate", "norm"):
        first, second = (graph.writer_for_one(each, kind) for each in (q, k))
        if first is None or second is None:
            continue
        if kind == "rotate" and first.weights == second.weights:
            weights |= first.weights
        elif kind == "norm" and first.attributes == second.attributes and first.attributes["group"]:
            weights |= {"q_gain": first.weights["gain"], "k_gain": second.weights["gain"]}
            eps = first.attributes["eps"]
        else:
            continue
        q, k = first.inputs["x"], second.inputs["x"]
        changes |= {first: None, second: None}
    inputs = {"q": q, "k": k, "v": store.inputs["v"]}
    return {**changes, operation: operation.changed(inputs=inputs, weights=weights, attributes={"eps": eps})}


def order_for_reader(graph: Graph, operation: Operation) -> Changes:
    """What only one product reads is written in the order in which that product reads it."""
    if operation.kind not in ("norm", "linear", "attend") or "reader" in operation.weights:
        return {}
    is_gate = operation.kind != "linear" or operation.attributes["function"]
    if not is_gate or (operation.kind == "norm" and operation.attributes["group"]):
        return {}
    y = operation.outputs["y"]
    readers = graph.readers(y)
    if len(readers) != 1 or readers[0].kind not in ("linear", "output") or readers[0].inputs["x"] is not y:
        return {}
    (reader,) = readers
    if reader.attributes.get("heads", 1) > 1:
        return {}
    # The product's own weight is named once more, by the writer: the same parameter.
    return {
        operation: operation.changed(weights={"reader": reader.weights["weight"]}),
        reader: reader.changed(attributes={"ordered": True}),
    }


Rule = Callable[[Graph, Operation], Changes]
RULES: Final[tuple[Rule, ...]] = (gate_in_product, add_in_product, add_in_norm, attend_together, order_for_reader)
"""Operation -> what changes; nothing where the rule does not fit."""


def _changes(rule: Rule, operations: Sequence[Operation]) -> Changes:
    """What a rule changes at once: no operation twice."""
    graph, changes = Graph(operations), Changes()
    for operation in operations:
        change = rule(graph, operation)
        if changes.keys().isdisjoint(change):
            changes |= change
    return changes


def _view_of(root: Value, x: Value) -> Value:
    return root if x.whole is None else replace(x, whole=root)
