"""A network as one of several ranks computes it, by rules over operations. None knows a family.

    attend, store    heads are dealt out: a rank has its own, and keeps their keys and values alone
    activate         columns of the gate and as many of what it gates
    experts          the same of each expert
    linear           what writes these has the rows of its weight that they need; what reads them the columns, and so
                     does a part of every sum: an `all_reduce` follows, and its bias is added by rank 0 alone
    gather, output   rows of the table and of the head: a token's row is added to zeros of the other ranks, and each
                     rank tells the others the logits it has
    everything else  is computed by every rank, with the same bits

Each rank adds up less before its sums are added to the others': the bits are others than those of one rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from llm_serving.errors import ModelError
from llm_serving.network.builder import PANEL, Network, blocks, filled
from llm_serving.network.operations import Float32Array, Operation, Value, Weight
from llm_serving.network.rewriting import Graph

KEY: Final = "cluster_config.tensor_parallel"

Numbers = tuple[int, ...]
"""Columns of a value, or rows or columns of a weight: those that a rank has."""


class _CannotShardError(Exception):
    """Says what must hold."""


def sharded(network: Network, rank: int, count: int) -> Network:
    """What `rank` of `count` computes.

    Raises:
        ModelError: The network cannot be dealt out to so many.
    """
    try:
        return _Sharding(network, rank, count).result
    except _CannotShardError as error:
        raise ModelError(f"{KEY}: {error}. Given: {count}") from None


def rule_against(network: Network, count: int) -> str | None:
    """What must hold for so many ranks and does not; None where the network can be dealt out."""
    try:
        _Sharding(network, 0, count)
    except _CannotShardError as error:
        return str(error)
    return None


class _Sharding:
    """One pass over the operations of a network, to find what is dealt out, and one to write what the rank does."""

    def __init__(self, network: Network, rank: int, count: int) -> None:
        self._network, self._rank, self._count = network, rank, count
        self._graph = Graph(network.operations)
        self._columns: dict[Value, Numbers] = {}
        """Of each value that no rank has whole: its columns here."""
        self._values: dict[Value, Value] = {}
        """What there is in place of a value."""
        self.result = Network(network.hidden, network.vocab)
        self.result.rotaries = network.rotaries
        self.result.optional = set(network.optional)
        for each in network.operations:
            if each.kind == "attend":
                self._deal_heads(each)
            elif each.kind == "activate":
                inner = each.outputs["y"].width
                self._deal(
                    each.inputs["x"], [(0, inner), (inner, inner)], f"the {inner} columns of a feed-forward layer"
                )
        for each in network.operations:
            self._write(each)

    def _deal_heads(self, attend: Operation) -> None:
        """Of queries, keys and values: so many of each that a rank has whole groups."""
        if "q_turned" in attend.inputs:
            raise _CannotShardError("must be 1 for a model whose keys are latent")
        store = self._graph.stores[attend.attributes["layer"]]
        kv_heads = self._network.caches[attend.attributes["layer"]].kv_heads
        products: dict[Value, list[tuple[int, int]]] = {}
        for value in (attend.inputs["q"], store.inputs["k"], store.inputs["v"]):
            made = self._product_of(value)
            products.setdefault(made.root, []).append((made.start, made.width))
        if kv_heads % self._count:
            raise _CannotShardError(f"must divide the {kv_heads} heads of keys and values")
        for product, ranges in products.items():
            self._deal(product, ranges, "heads")

    def _product_of(self, value: Value) -> Value:
        """The columns of a product that heads are made of, one by one."""
        while (writer := self._graph.writer(value)) is not None and writer.kind in ("rotate", "norm"):
            if writer.kind == "norm" and not writer.attributes["group"]:
                raise _CannotShardError("must be 1 for a model that norms all heads together")
            value = writer.inputs["x"]
        return value

    def _deal(self, value: Value, ranges: Iterable[tuple[int, int]], what: str) -> None:
        """Of each range of columns a rank has its share."""
        writer = self._graph.writer(value)
        if writer is None or writer.kind != "linear" or writer.attributes["heads"] > 1:
            raise _CannotShardError(f"must be 1 for a model in which no product alone makes {what}")
        columns: list[int] = []
        for start, width in sorted(ranges):
            if width % self._count:
                raise _CannotShardError(f"must divide {what}")
            columns += range(start, start + width)[self._share(width)]
        if len(columns) * self._count != value.width:
            raise _CannotShardError(f"must be 1 for a model whose products make more than {what}")
        self._columns[value] = _once(tuple(columns))

    def _share(self, size: int) -> slice:
        share = size // self._count
        return slice(self._rank * share, (self._rank + 1) * share)

    def _write(self, operation: Operation) -> None:
        """What the rank does in place of an operation."""
        kind, y = operation.kind, operation.outputs.get("y")
        given = operation.changed(inputs={role: self._here(x) for role, x in operation.inputs.items()})
        dealt = any(x.root in self._columns for x in operation.inputs.values())
        if kind in ("gather", "output"):
            self._write_vocabulary(given)
        elif kind == "experts":
            self._write_part(given, _of_experts(given, self._rank, self._count))
        elif y in self._columns and not dealt:
            self._record(given, {role: _rows(each, self._columns[y]) for role, each in given.weights.items()})
        elif not dealt:
            self._record(given, given.weights)
        elif kind == "linear" and y not in self._columns:
            self._write_part(given, self._of_reader(operation))
        elif kind == "store":
            cache = self._network.caches[given.attributes["layer"]]
            self.result.caches.append(replace(cache, kv_heads=cache.kv_heads // self._count))
            self._record(given, {})
        elif kind in ("rotate", "attend", "activate") or (kind == "norm" and given.attributes["group"]):
            assert y is not None
            self._columns[y] = _once(tuple(range(y.width)[self._share(y.width)]))
            slopes = {
                role: _Share.of(each, self._rank, self._count)
                for role, each in given.weights.items()
                if role == "slopes"
            }
            self._record(given, {**given.weights, **slopes})
        else:
            raise _CannotShardError(f"must be 1 for a model with `{kind}` of what ranks have parts of")

    def _of_reader(self, operation: Operation) -> dict[str, Weight]:
        """The weights of a product of what no rank has whole."""
        x, weights = operation.inputs["x"], dict(operation.weights)
        if x.whole is not None or operation.attributes["heads"] > 1 or weights["weight"].change is not None:
            raise _CannotShardError("must be 1 for a model that multiplies parts of what ranks have parts of")
        weights["weight"] = _columns(weights["weight"], self._columns[x])
        if self._rank and (bias := weights.pop("bias", None)) is not None:
            self.result.optional.update(bias.names)
        return weights

    def _write_vocabulary(self, operation: Operation) -> None:
        """Rows of table or head, as csrc/ranks.h deals them out."""
        ((role, whole),) = operation.weights.items()
        rows = self._network.vocab
        if rows < self._count:
            raise _CannotShardError(f"must be at most the {rows} tokens of the vocabulary")
        first, last = (rank * rows // self._count for rank in (self._rank, self._rank + 1))
        weights = {role: _rows(whole, _once(tuple(range(first, last))))}
        part = operation.changed(attributes={"first": first, "rows": rows})
        if operation.kind == "output":
            self._record(part, weights)
        else:
            self._write_part(part, weights)

    def _write_part(self, operation: Operation, weights: Mapping[str, Weight]) -> None:
        """A part of a sum, and what adds it to those of the others."""
        y = operation.outputs["y"]
        part = replace(y, name=f"{y.name}.part")
        self._record(operation.changed(outputs={"y": part}), weights)
        self._record(Operation("all_reduce", {"x": self._values.pop(part)}, {}, {"y": y}, {}), {})

    def _record(self, operation: Operation, weights: Mapping[str, Weight]) -> None:
        outputs = {}
        for role, y in operation.outputs.items():
            columns = self._columns.get(y)
            outputs[role] = self._values[y] = y if columns is None else replace(y, width=len(columns))
        self.result.operations.append(
            Operation(operation.kind, operation.inputs, weights, outputs, operation.attributes)
        )

    def _here(self, x: Value) -> Value:
        """What the rank has of a value, or of a view of one."""
        whole = self._values[x.root]
        if x.whole is None:
            return whole
        columns = self._columns.get(x.root)
        if columns is None:
            return replace(x, whole=whole)
        start = sum(each < x.start for each in columns)
        width = sum(x.start <= each < x.start + x.width for each in columns)
        return replace(x, whole=whole, start=start, width=width)


def _of_experts(operation: Operation, rank: int, count: int) -> dict[str, Weight]:
    """Of each expert a share of its columns, filled up with zeros as all of them are."""
    gate_up, down = operation.weights["gate_up"], operation.weights["down"]
    inner = down.shape[1]
    if inner % count:
        raise _CannotShardError(f"must divide the {inner} columns of an expert")
    first = rank * (inner // count)
    columns = tuple(-1 if i < 0 else first + i for i in filled(inner // count, PANEL))
    rows = blocks(2 * operation.attributes["experts"], inner, columns)
    return {"gate_up": _rows(gate_up, _once(tuple(rows))), "down": _columns(down, _once(columns))}


def _rows(weight: Weight, numbers: Numbers) -> Weight:
    """Some of the rows of a weight, or of the elements of a bias."""
    return replace(weight, shape=(len(numbers), *weight.shape[1:]), rows=_picked(weight.rows, numbers))


def _columns(weight: Weight, numbers: Numbers) -> Weight:
    return replace(weight, shape=(weight.shape[0], len(numbers)), columns=_picked(weight.columns, numbers))


@dataclass(frozen=True)
class _Share:
    """A part of a vector that no tensor holds."""

    whole: Callable[[int], Float32Array]
    start: int
    stop: int

    def __call__(self, num_positions: int) -> Float32Array:
        return self.whole(num_positions)[self.start : self.stop]

    @classmethod
    def of(cls, weight: Weight, rank: int, count: int) -> Weight:
        assert weight.made is not None
        share = weight.shape[0] // count
        return replace(weight, shape=(share,), made=cls(weight.made, rank * share, (rank + 1) * share))


@lru_cache(64)
def _picked(order: Numbers | None, numbers: Numbers) -> Numbers:
    return numbers if order is None else tuple(-1 if number < 0 else order[number] for number in numbers)


@lru_cache(64)
def _once(numbers: Numbers) -> Numbers:
    """Layers alike have one and the same."""
    return numbers
