"""Tensor parallelism: the part of a network that one rank computes, by rules that are independent of the model family.

    attention, store_kv  heads, and columns of an output gate, are split: a rank computes its own heads and stores
                         only their keys and values. Latent keys belong to all heads, so every rank stores all of them
    norm of all heads    every rank computes this norm, and the product before it, for all heads, and uses its own heads
    delta_rule, ssm      heads are split as well, with their states and with the columns of the convolution before
                         them. If there are more ranks than groups of heads, several ranks compute one group
    causal_conv          columns are split, if a gate precedes and another gate follows the convolution (LFM2)
    gated_activation     columns of the gate and the matching columns of up are split
    experts              gate and up are split in the same way within each expert
    linear               the operation that produces a split value has the rows of its weight that the rank needs. The
                         operation that consumes it has the matching columns and computes a partial sum. An `all_reduce`
                         follows, and only rank 0 adds the bias
    embedding, lm_head   rows of the table and of the head are split. The rank that has a token's row looks it up, other
                         ranks add zeros. Each rank sends the logits that it computes to the others
    other operations     every rank computes them with identical bits. This includes a `delta_rule` or `ssm` whose heads
                         or groups cannot be divided, or that is followed by a norm over the heads of several ranks

Partial sums change the order of additions, so the bits differ from those of a single rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from llm_serving.errors import ModelError
from llm_serving.formats.block_tensor import PANEL_ROWS
from llm_serving.network.builder import Network
from llm_serving.network.caches import StateShape
from llm_serving.network.operations import Float32Array, Operation, Value, Weight
from llm_serving.network.rewriting import Graph
from llm_serving.network.weights import padded_order, repeated_order, shared_order, with_columns, with_rows

KEY: Final = "cluster_config.tensor_parallel"

_OF_SPLIT_VALUES: Final = frozenset({"rope", "attention", "gated_activation", "activation", "multiply"})

_RECURRENCES: Final = {"delta_rule": (("q", "k"), ("v",), ("a", "b")), "ssm": (("b", "c"), ("x",), ("dt",))}
"""Kind -> inputs that each group of heads shares, inputs of each head, and inputs with one column for each head."""

Indices = tuple[int, ...]


class _CannotShardError(Exception):
    """The network cannot be split over ranks. The message is the rule for `tensor_parallel`, such as "must be 1"."""


def sharded(network: Network, rank: int, count: int) -> Network:
    """Return the network of `rank`. Raise ModelError if the network cannot be split over `count` ranks."""
    try:
        return _Sharding(network, rank, count).result
    except _CannotShardError as error:
        raise ModelError(f"{KEY}: {error}. Given: {count}") from None


def sharding_violation(network: Network, count: int) -> str | None:
    """Return the rule that forbids splitting the network over `count` ranks. Return None if it can be split."""
    try:
        _Sharding(network, 0, count)
    except _CannotShardError as error:
        return str(error)
    return None


class _Sharding:
    """Shards a network. One pass finds the split values, a second one writes the operations of the rank."""

    def __init__(self, network: Network, rank: int, count: int) -> None:
        if not network.causal or network.num_labels:
            raise _CannotShardError("must be 1 for an encoder or a model with a classifier")
        self._network, self._rank, self._count = network, rank, count
        self._graph = Graph(network.operations)
        self._columns: dict[Value, Indices] = {}
        self._own_columns: set[Value] = set()
        """Values that this rank computes whole, although it reads only its own columns of them."""
        self._split_stores: set[Operation] = set()
        self._values: dict[Value, Value] = {}
        self.result = Network(network.hidden, network.vocab)
        self.result.rotaries = network.rotaries
        self.result.states = list(network.states)
        self.result.optional = set(network.optional)
        for each in network.operations:
            if each.kind == "attention":
                self._shard_heads(each)
            elif each.kind in _RECURRENCES:
                self._shard_recurrence(each)
            elif each.kind == "causal_conv":
                self._shard_gated_convolution(each)
            elif _is_activation(each):
                inner, (x, *_) = each.outputs["y"].width, each.inputs.values()
                ranges = [(start, inner, count) for start in range(0, x.width, inner)]
                self._shard(x, ranges, f"the {inner} columns of a feed-forward layer")
        for each in network.operations:
            self._write(each)

    def _shard_heads(self, attend: Operation) -> None:
        store = self._graph.store_of(attend)
        cache = self._network.caches[attend.attributes["layer"]]
        gates = [each.inputs["b"] for each in self._graph.consumers(attend.outputs["y"]) if each.kind == "multiply"]
        heads = [attend.inputs["q"], *gates]
        if "q_rope" in attend.inputs:
            heads.append(attend.inputs["q_rope"])
            if (queries := attend.inputs["q"].width // cache.key_width) % self._count:
                raise _CannotShardError(f"must divide the {queries} heads of queries")
        elif cache.kv_heads % self._count:
            raise _CannotShardError(f"must divide the {cache.kv_heads} heads of keys and values")
        # Layers that read the keys of an earlier one split only their queries.
        elif store not in self._split_stores:
            self._split_stores.add(store)
            heads += store.inputs["k"], store.inputs["v"]
        found = [self._product_of(value) for value in heads]
        whole = {made.root for made, normed in found if normed is not None}
        split = []
        for made, normed in found:
            if made.root in whole:
                self._own_columns.add(made if normed is None else normed)
            else:
                split.append((made, self._count))
        self._shard_all(split)

    def _shard_recurrence(self, scan: Operation) -> None:
        """Split a `delta_rule` or `ssm` by heads, with its convolution. Do nothing if heads do not divide evenly."""
        y, (of_groups, of_heads, of_columns) = scan.outputs["y"], _RECURRENCES[scan.kind]
        convolution, after = self._graph.producer(scan.inputs[of_groups[0]].root), self._norms_and_gates(y)
        heads, groups = scan.inputs[of_columns[0]].width, scan.attributes["heads"]
        is_divisible = not heads % self._count and not max(groups, self._count) % min(groups, self._count)
        norms = [each.attributes["group"] or y.width for each in after if each.kind == "rms_norm"]
        if any((y.width // self._count) % columns for columns in norms) or not is_divisible:
            return
        if convolution is None or convolution.kind != "causal_conv":
            return
        mixed, mixture = convolution.inputs["x"], convolution.outputs["y"]
        parts = [(scan.inputs[role], min(groups, self._count)) for role in of_groups]
        parts += [(scan.inputs[role], self._count) for role in of_heads]
        self._columns[mixture] = self._columns_of((part.start, part.width, count) for part, count in parts)
        split = [(replace(part, base=mixed.root, start=mixed.start + part.start), count) for part, count in parts]
        split += [(scan.inputs[role], self._count) for role in of_columns]
        self._shard_all(split + [(each.inputs["b"], self._count) for each in after if each.kind == "multiply"])

    def _shard_gated_convolution(self, convolution: Operation) -> None:
        before = self._graph.producer(convolution.inputs["x"])
        after = self._norms_and_gates(y := convolution.outputs["y"])
        is_gated = before is not None and [each.kind for each in (before, *after)] == ["multiply"] * 2
        if before is not None and is_gated and not y.width % self._count:
            gated = *before.inputs.values(), after[0].inputs["b"]
            self._shard_all([(value, self._count) for value in gated])
            self._columns[y] = self._own(y.width)

    def _norms_and_gates(self, value: Value) -> list[Operation]:
        found: list[Operation] = []
        for each in self._graph.consumers(value):
            if each.kind in ("rms_norm", "multiply"):
                found += each, *self._norms_and_gates(each.outputs["y"])
        return found

    def _product_of(self, value: Value) -> tuple[Value, Value | None]:
        """Return the result of the matrix product, or the columns of it, from which `value`, such as attention's
        queries, is computed. If a norm over all heads follows the product, also return the norm's result, else None.
        """
        normed = None
        while (producer := self._graph.producer(value)) is not None:
            if producer.kind == "rms_norm" and not producer.attributes["group"]:
                normed = normed or value
            elif producer.kind not in ("rope", "rms_norm") and not _is_product_of_heads(producer):
                break
            value = producer.inputs["x"]
        return value, normed

    def _shard_all(self, split: Iterable[tuple[Value, int]]) -> None:
        products: dict[Value, set[tuple[int, int, int]]] = {}
        for value, count in split:
            products.setdefault(value.root, set()).add((value.start, value.width, count))
        for product, ranges in products.items():
            self._shard(product, ranges, "heads")

    def _shard(self, value: Value, ranges: Collection[tuple[int, int, int]], what: str) -> None:
        producer = self._graph.producer(value)
        if producer is None or producer.kind != "linear" or producer.attributes["heads"] > 1:
            raise _CannotShardError(f"must be 1 for a model that does not compute {what} in one matrix product")
        if any(width % count for _, width, count in ranges):
            raise _CannotShardError(f"must divide {what}")
        if sum(width for _, width, _ in ranges) != value.width:
            raise _CannotShardError(f"must be 1 for a model that computes {what} and other values in one product")
        self._columns[value] = self._columns_of(ranges)

    def _columns_of(self, ranges: Iterable[tuple[int, int, int]]) -> Indices:
        """Divide the parts of ranges (first column, width, number of parts) over ranks. Return this rank's columns."""
        shares = (range(start, start + width)[self._share(width, count)] for start, width, count in sorted(ranges))
        return shared_order(tuple(column for share in shares for column in share))

    def _share(self, size: int, count: int | None = None) -> slice:
        count = count or self._count
        part, share = self._rank * count // self._count, size // count
        return slice(part * share, (part + 1) * share)

    def _own(self, size: int) -> Indices:
        return shared_order(tuple(range(size)[self._share(size)]))

    def _write(self, operation: Operation) -> None:
        kind, y = operation.kind, operation.outputs.get("y")
        given = operation.changed(inputs={role: self._local(x) for role, x in operation.inputs.items()})
        is_split = any(map(self._is_split, operation.inputs.values()))
        if kind in ("embedding", "lm_head"):
            self._write_vocabulary(given)
        elif kind == "experts":
            if self._rank and "down_bias" in given.weights:
                self.result.optional.update(given.weights["down_bias"].names)
            self._write_partial_sum(given, _shard_experts(given, self._rank, self._count))
        elif is_split and _is_product_of_heads(operation):
            assert y is not None
            self._columns[y] = self._own(y.width)
            weights = {role: self._of_own_heads(each) for role, each in given.weights.items()}
            self._record(given.changed(attributes={"heads": operation.attributes["heads"] // self._count}), weights)
        elif is_split and (kind in _RECURRENCES or kind == "causal_conv"):
            self._write_states(given)
        elif y in self._columns and not is_split:
            self._record(given, {role: with_rows(each, self._columns[y]) for role, each in given.weights.items()})
        elif not is_split:
            if kind == "store_kv":
                self.result.caches.append(self._network.caches[given.attributes["layer"]])
            self._record(given, given.weights)
        elif kind == "linear" and y not in self._columns:
            self._write_partial_sum(given, self._consumer_weights(operation))
        elif kind == "store_kv":
            cache = self._network.caches[given.attributes["layer"]]
            self.result.caches.append(replace(cache, kv_heads=cache.kv_heads // self._count))
            self._record(given, {})
        elif kind == "multiply" and not all(map(self._is_split, operation.inputs.values())):
            raise _CannotShardError(
                "must be 1: the model multiplies values that are split over ranks by values that are not"
            )
        elif kind in _OF_SPLIT_VALUES or (kind == "rms_norm" and given.attributes["group"]):
            assert y is not None
            self._columns[y] = self._own(y.width)
            self._record(given, {role: self._part(operation, role, each) for role, each in given.weights.items()})
        else:
            raise _CannotShardError(f"must be 1 for a model that applies `{kind}` to split values")

    def _is_split(self, x: Value) -> bool:
        return x.root in self._columns or x in self._own_columns

    def _of_own_heads(self, weight: Weight) -> Weight:
        order = tuple(range(weight.shape[0])) if weight.rows is None else weight.rows
        rows = shared_order(order[self._share(len(order))])
        return replace(weight, shape=(weight.shape[0] // self._count, weight.shape[1]), rows=rows)

    def _part(self, operation: Operation, role: str, weight: Weight) -> Weight:
        if role == "slopes":
            assert weight.generate is not None
            share = weight.shape[0] // self._count
            return replace(weight, shape=(share,), generate=_VectorPart(weight.generate, self._rank * share, share))
        of_row = role in ("gamma", "beta") and weight.shape[0] != operation.attributes["group"]
        if role in ("sinks", "offset") or of_row:
            return with_rows(weight, self._own(weight.shape[0]))
        return weight

    def _consumer_weights(self, operation: Operation) -> dict[str, Weight]:
        x, weights = operation.inputs["x"], dict(operation.weights)
        if x.base is not None or operation.attributes["heads"] > 1 or weights["weight"].transform is not None:
            raise _CannotShardError("must be 1 for a model that multiplies only some columns of a split value")
        weights["weight"] = with_columns(weights["weight"], self._columns[x])
        if self._rank and (bias := weights.pop("bias", None)) is not None:
            self.result.optional.update(bias.names)
        return weights

    def _write_states(self, operation: Operation) -> None:
        y, number = operation.outputs["y"], operation.attributes["state"]
        whole = self.result.states[number].shape
        if operation.kind in _RECURRENCES:
            self._columns[y] = self._own(y.width)
            shape = (whole[0] // self._count, *whole[1:])
            weights = {role: with_rows(each, self._own(whole[0])) for role, each in operation.weights.items()}
            operation = operation.changed(attributes={"heads": max(operation.attributes["heads"] // self._count, 1)})
        else:
            columns = self._columns[y]
            shape = (whole[0], len(columns))
            # The stored tensor has a row of taps for each column. It is transposed after its rows are selected.
            weights = {
                role: replace(with_rows(each, columns), shape=(*each.shape[:-1], len(columns)))
                for role, each in operation.weights.items()
            }
        self.result.states[number] = StateShape(shape)
        self._record(operation, weights)

    def _write_vocabulary(self, operation: Operation) -> None:
        rows = self._network.vocab
        if rows < self._count:
            raise _CannotShardError(f"must be at most the {rows} tokens of the vocabulary")
        first, last = (rank * rows // self._count for rank in (self._rank, self._rank + 1))
        order = shared_order(tuple(range(first, last)))
        weights = {role: with_rows(whole, order) for role, whole in operation.weights.items()}
        part = operation.changed(attributes={"first": first, "rows": rows})
        if operation.kind == "lm_head":
            self._record(part, weights)
        else:
            self._write_partial_sum(part, weights)

    def _write_partial_sum(self, operation: Operation, weights: Mapping[str, Weight]) -> None:
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

    def _local(self, x: Value) -> Value:
        whole = self._values[x.root]
        if x in self._own_columns:
            share = range(x.start, x.start + x.width)[self._share(x.width)]
            return replace(x, base=whole, start=share.start, width=len(share))
        if x.base is None:
            return whole
        columns = self._columns.get(x.root)
        if columns is None:
            return replace(x, base=whole)
        start = sum(each < x.start for each in columns)
        width = sum(x.start <= each < x.start + x.width for each in columns)
        return replace(x, base=whole, start=start, width=width)


def _is_activation(operation: Operation) -> bool:
    of_one_value = operation.kind == "multiply" and operation.inputs["a"] is operation.inputs.get("b")
    return of_one_value or operation.kind in ("gated_activation", "activation")


def _is_product_of_heads(operation: Operation) -> bool:
    return operation.kind == "linear" and operation.attributes["heads"] > 1


def _shard_experts(operation: Operation, rank: int, count: int) -> dict[str, Weight]:
    """Split the intermediate columns of each expert over the ranks. Pad each share to whole panels of weight rows."""
    gate_up, down = operation.weights["gate_up"], operation.weights["down"]
    inner = down.shape[1]
    if inner % count:
        raise _CannotShardError(f"must divide the {inner} columns of an expert")
    first = rank * (inner // count)
    columns = tuple(-1 if i < 0 else first + i for i in padded_order(inner // count, PANEL_ROWS))
    rows = shared_order(tuple(repeated_order(gate_up.shape[0] // inner, inner, columns)))
    weights = dict(operation.weights) | {
        "gate_up": with_rows(gate_up, rows),
        "down": with_columns(down, shared_order(columns)),
    }
    if "gate_up_bias" in weights:
        weights["gate_up_bias"] = with_rows(weights["gate_up_bias"], rows)
    if rank:
        weights.pop("down_bias", None)  # only rank 0 adds the bias
    return weights


@dataclass(frozen=True)
class _VectorPart:
    whole: Callable[[int], Float32Array]
    start: int
    size: int

    def __call__(self, num_positions: int) -> Float32Array:
        return self.whole(num_positions)[self.start : self.start + self.size]
