"""Slots for low-rank adapters (LoRA, Hu et al. 2021) in the linear operations of a network.

The result of a row x with an adapter is x * weight^T + B * round(A * x). A * x is rounded to the model dtype, and so is
the sum at the end. A slot holds the matrices A and B of one adapter for every linear operation. If an operation stacks
several tensors, such as q, k and v, each tensor is one part: it has its own A, which affects only its own columns of
the result. With tensor parallelism, a rank with some rows of the weight holds the same rows of B, and a rank with some
columns holds the same columns of A.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from llm_serving.errors import ModelError
from llm_serving.formats.peft import WEIGHTS_NAME, LowRankChange, PeftAdapter
from llm_serving.formats.stored_tensor import to_float32
from llm_serving.network.builder import Network
from llm_serving.network.operations import Float32Array, Operation, Weight
from llm_serving.network.weights import picked

PANEL: Final = 16
"""Number of weight rows that a matrix product reads together: kPanelWidth of csrc/kernels.h."""
SUFFIX: Final = ".weight"


class Matrices(NamedTuple):
    """A [rank, K] and scale * B [N, rank] of one part. For part q of a QKV weight, B's rows for k and v are zeros."""

    a: Float32Array
    b: Float32Array


@dataclass(frozen=True)
class AdaptedLinear:
    """The adapter slots of one linear operation. Each tensor that the operation stacks is one part.

    Attributes:
        modules: Name of each stacked tensor, without `.weight`.
        part_of_panel: For each panel (16 columns of the result), the index of its part.
        a, b: The matrices A and B of all slots. Each part has room for rank R. The C++ kernels read panels (`panels`):
            [slots, parts * R / 16, K, 16] and [slots, N / 16, R, 16], with K, N and R rounded up to multiples of 16.
            MindSpore Cells read [slots * R, K] and [N, slots * R], and all tensors form one part.
        ranks: float32 [slots, parts], the actual rank (up to R) of each part in each slot, for the C++ kernels.
        parts: `part_of_panel` as float32 [N / 16], for the C++ kernels.
    """

    weight: Weight
    modules: tuple[str, ...]
    part_of_panel: tuple[int, ...]
    a: Weight
    b: Weight
    ranks: Weight
    parts: Weight

    @property
    def num_parts(self) -> int:
        return 1 + max(self.part_of_panel)

    def stored_shape(self, module: str) -> tuple[int, int]:
        rows, columns = self.weight.stored_shapes[self.modules.index(module)]
        return rows, columns

    def matrices(self, changes: Mapping[str, LowRankChange]) -> list[Matrices]:
        """Return the matrices of each part. `changes`: changes of this operation's modules, and perhaps of others."""
        of_parts = [(name,) for name in self.modules] if self.num_parts > 1 else [self.modules]
        return [self._matrices({name: changes[name] for name in names if name in changes}) for names in of_parts]

    def _matrices(self, changes: Mapping[str, LowRankChange]) -> Matrices:
        heights = [rows for rows, _ in self.weight.stored_shapes]
        rank = sum(len(each.a) for each in changes.values())
        a = np.zeros((rank, self.weight.stored_shapes[0][1]), np.float32)
        b = np.zeros((sum(heights), rank), np.float32)
        at = 0
        for name, change in changes.items():
            index, end = self.modules.index(name), at + len(change.a)
            first = sum(heights[:index])
            a[at:end] = to_float32(change.a)
            b[first : first + heights[index], at:end] = to_float32(change.b) * np.float32(change.scale)
            at = end
        return Matrices(picked(a.T, self.weight.columns).T, picked(b, self.weight.rows))


def with_adapters(
    network: Network, slots: int, max_rank: int, *, as_program: bool
) -> tuple[Network, list[AdaptedLinear]]:
    """Return a copy of the network whose linear operations have adapter slots, and these slots. The LM head or
    classifier gets no slots. Other linear operations get none if their weight is transformed, transposed or separate
    for each head. `as_program`: lay the slots out for the C++ kernels, else for MindSpore Cells.
    """
    head = network.head_operations
    operations: list[Operation] = []
    linears: list[AdaptedLinear] = []
    for each in network.operations:
        weight = each.weights.get("weight")
        if each in head or each.kind != "linear" or weight is None or not _is_plain(each, weight):
            operations.append(each)
            continue
        linear = _adapted(weight, slots, padded_to_panels(max_rank), as_program=as_program)
        linears.append(linear)
        weights = {"a": linear.a, "b": linear.b, "ranks": linear.ranks, "parts": linear.parts}
        operations.append(each.changed(weights=weights if as_program else {"a": linear.a, "b": linear.b}))
    return network.changed(operations=operations, num_adapter_slots=slots), linears


def experts_modules(network: Network) -> tuple[str, ...]:
    """Return the names of the tensors of routers and experts. Adapters must not change them."""
    weights = [
        weight for each in network.operations if each.kind in ("experts", "route") for weight in each.weights.values()
    ]
    return tuple(name.removesuffix(SUFFIX) for weight in weights for name in weight.names)


def panels(matrix: Float32Array, *, in_pairs: bool) -> Float32Array:
    """Return a matrix [N, K] as zero-padded panels [N / 16, K, 16], the layout that the C++ kernels read. `in_pairs`:
    place inputs 2i and 2i + 1 of a row next to each other, as bfloat16 kernels multiply them together.
    """
    n, k = matrix.shape
    rows, inputs = padded_to_panels(n), padded_to_panels(k)
    padded = np.zeros((rows, inputs), np.float32)
    padded[:n, :k] = matrix
    together = 2 if in_pairs else 1
    split = padded.reshape(rows // PANEL, PANEL, inputs // together, together)
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3)).reshape(rows // PANEL, inputs, PANEL)


def _is_plain(operation: Operation, weight: Weight) -> bool:
    return operation.attributes["heads"] == 1 and weight.transform is None and not weight.transposed


def _adapted(weight: Weight, slots: int, max_rank: int, *, as_program: bool) -> AdaptedLinear:
    modules = tuple(name.removesuffix(SUFFIX) for name in weight.names)
    n, k = weight.shape
    part_of_panel = _part_of_panel(weight) if as_program else (0,)
    num_parts = 1 + max(part_of_panel)
    rank = max_rank * len(modules) // num_parts
    of_a: tuple[int, ...] = (slots * rank, k)
    of_b: tuple[int, ...] = (n, slots * rank)
    if as_program:
        of_a = (slots, num_parts * rank // PANEL, padded_to_panels(k), PANEL)
        of_b = (slots, len(part_of_panel), rank, PANEL)
    a, b = (
        Weight((), shape, generate=_Zeros(f"{modules[0]}.{part}", shape)) for part, shape in (("a", of_a), ("b", of_b))
    )
    of_ranks = (slots, num_parts)
    ranks = Weight((), of_ranks, generate=_Zeros(f"{modules[0]}.ranks", of_ranks), dtype="float32")
    parts = Weight((), (len(part_of_panel),), generate=_Numbers(part_of_panel), dtype="float32")
    return AdaptedLinear(weight, modules, part_of_panel, a, b, ranks, parts)


def _part_of_panel(weight: Weight) -> tuple[int, ...]:
    ends = np.cumsum([rows for rows, _ in weight.stored_shapes])
    rows = np.arange(weight.shape[0]) if weight.rows is None else np.array(weight.rows)
    tensors = np.where(rows < 0, -1, np.searchsorted(ends, rows, side="right"))
    of_panels = [set(tensors[at : at + PANEL].tolist()) - {-1} or {0} for at in range(0, len(rows), PANEL)]
    is_divided = all(len(each) == 1 for each in of_panels) and len(set.union(*of_panels)) == len(ends)
    return tuple(each.pop() if is_divided else 0 for each in of_panels)


def padded_to_panels(size: int) -> int:
    return -(-size // PANEL) * PANEL


@dataclass(frozen=True)
class _Zeros:
    """Generates the zeros of empty slots. `name` is unique, because weights that compare equal share one parameter."""

    name: str
    shape: tuple[int, ...]

    def __call__(self, num_positions: int) -> Float32Array:
        return np.zeros(self.shape, np.float32)


@dataclass(frozen=True)
class _Numbers:
    values: Sequence[int]

    def __call__(self, num_positions: int) -> Float32Array:
        return np.array(self.values, np.float32)


class AdapterLimits(NamedTuple):
    max_loras: int
    max_rank: int


def check_adapter(
    adapter: PeftAdapter, linears: Sequence[AdaptedLinear], experts: Sequence[str], max_rank: int
) -> None:
    """Raise ModelError if the network cannot use an adapter, or if a matrix that its configuration names is missing."""
    path, config = adapter.folder / WEIGHTS_NAME, adapter.config
    if config.max_rank > max_rank:
        raise ModelError(
            f"{config.path}: `r` must be at most {max_rank} (lora_config.max_lora_rank). Given: {config.max_rank}"
        )
    slots = {name: linear for linear in linears for name in linear.modules}
    for module, change in adapter.modules.items():
        if module in experts:
            raise ModelError(f"{path}: adapters of experts and routers are not supported. Found: {module}")
        if module not in slots:
            known = sorted({name.rpartition(".")[2] for name in slots})
            raise ModelError(
                f"{path}: the model has no linear layer {module} that an adapter can change. It has: {', '.join(known)}"
            )
        rows, columns = slots[module].stored_shape(module)
        for part, axis, wanted in (("A", 1, columns), ("B", 0, rows)):
            shape = (change.a if part == "A" else change.b).shape
            if shape[axis] != wanted:
                rule = f"must have {wanted} {'rows' if axis == 0 else 'columns'}, as in the model"
                raise ModelError(f"{path}: {module}.lora_{part}.weight {rule}. Found: shape {list(shape)}")
    for module in slots:
        if config.targets_module(module) and module not in adapter.modules:
            raise ModelError(
                f"{path}: must have matrices of {module}, which `target_modules` of {config.path.name} names"
            )
