"""Slots for low-rank adapters (LoRA, Hu et al. 2021): an operation `lora` after each linear operation.

A slot holds the matrices A and B of one adapter for every such operation. If a linear operation stacks several tensors,
its A has the rows of all their matrices A, and its B is block-diagonal. With tensor parallelism, each process holds the
columns of A or the rows of B that belong to its part of the weight, so the sum over all processes includes the change
once.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from llm_serving.network.builder import Network
from llm_serving.network.operations import Float32Array, Operation, Weight
from llm_serving.network.weights import picked

PANEL: Final = 16
"""Number of rows of A that a matrix product reads together; kPanelWidth of csrc/kernels.h."""
SUFFIX: Final = ".weight"


@dataclass(frozen=True)
class LowRankChange:
    """The change `scale * b @ a` of one tensor: a [rank, columns], b [rows, rank], in the stored type or float32."""

    a: Float32Array
    b: Float32Array
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True)
class AdaptedLinear:
    """The slots of one linear operation.

    Attributes:
        modules: Name of each stacked tensor, without `.weight`.
        a, b: The matrices A and B of all slots. In a program: [slots, R / 16, K, 16] and [slots, R, N, padded]; in
            Cells: [slots * R, K] and [N, slots * R].
        ranks: Number of rows of A in use in each slot; only programs read it.
    """

    weight: Weight
    modules: tuple[str, ...]
    max_rank: int
    a: Weight
    b: Weight
    ranks: Weight

    def stored_shape(self, module: str) -> tuple[int, int]:
        """Return (rows, columns) of the whole tensor of a module."""
        rows, columns = self.weight.stored_shapes[self.modules.index(module)]
        return rows, columns

    def matrices(self, changes: Mapping[str, LowRankChange]) -> tuple[Float32Array, Float32Array]:
        """Return A [R', K] and scale * B [N, R'] of an adapter, in the weight's order. R' is the adapter's own rank."""
        present = [name for name in self.modules if name in changes]
        heights = [rows for rows, _ in self.weight.stored_shapes]
        rank = sum(changes[name].rank for name in present)
        a = np.zeros((rank, self.weight.stored_shapes[0][1]), np.float32)
        b = np.zeros((sum(heights), rank), np.float32)
        at = 0
        for name in present:
            change, index = changes[name], self.modules.index(name)
            first = sum(heights[:index])
            a[at : at + change.rank] = change.a
            b[first : first + heights[index], at : at + change.rank] = change.b * np.float32(change.scale)
            at += change.rank
        return picked(a.T, self.weight.columns).T, picked(b, self.weight.rows)


def with_adapters(
    network: Network, slots: int, max_rank: int, *, as_program: bool
) -> tuple[Network, list[AdaptedLinear]]:
    """Return a network with an operation `lora` after each linear operation whose weight is used without a transform,
    and the slots of these operations.

    Args:
        max_rank: Highest rank of an adapter, rounded up to a multiple of `PANEL`.
        as_program: Whether a program computes the network; otherwise Cells do.
    """
    adapted = copy(network)
    head = network.head_operations
    operations: list[Operation] = []
    linears: list[AdaptedLinear] = []
    for each in network.operations:
        weight = each.weights.get("weight")
        if each in head or each.kind != "linear" or weight is None or not _is_plain(each, weight):
            operations.append(each)
            continue
        linear = _adapted(weight, slots, -(-max_rank // PANEL) * PANEL, as_program=as_program)
        linears.append(linear)
        y = each.outputs["y"]
        base = replace(y, name=f"{y.name}.base")
        operations.append(each.changed(outputs={"y": base}))
        weights = {"a": linear.a, "b": linear.b, "ranks": linear.ranks}
        attributes = {"slots": slots}
        operations.append(Operation("lora", {"base": base, "x": each.inputs["x"]}, weights, {"y": y}, attributes))
    adapted.operations = operations
    if network._head_start is not None:
        adapted._head_start = len(operations) - len(head)
    adapted.num_adapter_slots = slots
    return adapted, linears


def experts_modules(network: Network) -> tuple[str, ...]:
    """Return the names of the tensors of routers and experts, which no adapter may change."""
    weights = [
        weight for each in network.operations if each.kind in ("experts", "route") for weight in each.weights.values()
    ]
    return tuple(name.removesuffix(SUFFIX) for weight in weights for name in weight.names)


def panels(a: Float32Array) -> Float32Array:
    """Return A [R', K] as panels [ceil(R' / 16), K, 16], padded with zeros."""
    rank, columns = a.shape
    padded = np.zeros((-(-rank // PANEL) * PANEL, columns), np.float32)
    padded[:rank] = a
    return np.ascontiguousarray(padded.reshape(-1, PANEL, columns).transpose(0, 2, 1))


def _is_plain(operation: Operation, weight: Weight) -> bool:
    return operation.attributes["heads"] == 1 and weight.transform is None and not weight.transposed


def _adapted(weight: Weight, slots: int, max_rank: int, *, as_program: bool) -> AdaptedLinear:
    modules = tuple(name.removesuffix(SUFFIX) for name in weight.names)
    (n, k), rank = weight.shape, max_rank * len(modules)
    of_a: tuple[int, ...] = (slots * rank, k)
    of_b: tuple[int, ...] = (n, slots * rank)
    if as_program:
        of_a, of_b = (slots, rank // PANEL, k, PANEL), (slots, rank, -(-n // PANEL) * PANEL)
    a, b = (
        Weight((), shape, generate=_Zeros(f"{modules[0]}.{part}", shape)) for part, shape in (("a", of_a), ("b", of_b))
    )
    ranks = Weight((), (slots,), generate=_Zeros(f"{modules[0]}.ranks", (slots,)), dtype="float32")
    return AdaptedLinear(weight, modules, max_rank, a, b, ranks)


@dataclass(frozen=True)
class _Zeros:
    """The initial zeros of the slots of one operation. `name` makes the weights of different operations unequal, so
    that they do not share one parameter."""

    name: str
    shape: tuple[int, ...]

    def __call__(self, num_positions: int) -> Float32Array:
        return np.zeros(self.shape, np.float32)
