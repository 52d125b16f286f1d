"""A network as a graph of Cells: the operations of a backend, one Cell for each operation of the description."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import mindspore as ms
from mindspore import nn

from llm_serving.backends.base import AttentionShape, Backend
from llm_serving.errors import ModelError
from llm_serving.lowering import operations as cells
from llm_serving.lowering.parameters import Parameters
from llm_serving.lowering.step_inputs import KVCaches
from llm_serving.network.builder import Network
from llm_serving.network.operations import Operation, Value, Weight
from llm_serving.network.rewriting import Plan, add_in_norm, apply, select_rows

RESULTS: Final = ("output", "states")
"""Operations whose result is that of the network."""

OF_GATHER: Final = ("scale", "rounded_scale", "first", "rows")
OF_OUTPUT: Final = ("scale", "cap", "first", "rows")
"""Attributes, as their Cells take them."""

MAX_READS: Final = 4
NUM_REGISTERS: Final = 8
"""As many as a step of any network needs at once; `Step` writes them out."""

Registers = Any
"""A tuple of tensors; MindSpore reads the functions that take it, not Python."""


class NetworkOfCells(nn.Cell):
    """The arguments of a step (`lowering.step.STEP_INPUTS`) -> logits, float32 [S, V], or states, float32 [S, H].

    Values live in a few registers: a graph is compiled the faster the less each Cell hands on.

    Args:
        network: The description.
        backend: Makes the operations.
        parameters: Of every weight.
        kv_caches: One pair for each layer.
        max_positions: Longest context of a row, in tokens: a window of as many is none.
        whole_prompts: For steps of whole prompts only; B is fixed in it, and unused rows have length 0.
        of_states: What the head would read is the result.

    Raises:
        ModelError: The backend has no operation for something the network needs.
    """

    def __init__(
        self,
        network: Network,
        backend: Backend,
        parameters: Parameters,
        kv_caches: KVCaches,
        max_positions: int,
        *,
        whole_prompts: bool = False,
        of_states: bool = False,
    ) -> None:
        super().__init__()
        lacks = backend.lacking(network, max_positions)
        if lacks is not None:
            raise ModelError(f"the Cells of {backend.name} have no {lacks}; kernels: program has")
        operations = network.states() if of_states else network.operations
        plan = apply(select_rows(operations), (add_in_norm,))
        self.seen = backend.seen(max_positions, kv_caches[0][0].shape[1])
        self.lengths = backend.lengths()
        listing = _Listing(plan, network, backend, parameters, kv_caches, max_positions, whole_prompts)
        self.steps = nn.CellList(listing.cells)

    def construct(
        self,
        token_ids: ms.Tensor,
        positions: ms.Tensor,
        slot_mapping: ms.Tensor,
        block_tables: ms.Tensor,
        q_seq_lens: ms.Tensor,
        batch_valid_length: ms.Tensor,
        sample_indices: ms.Tensor,
    ) -> ms.Tensor:
        seen = self.seen(positions, block_tables)
        lengths = self.lengths(q_seq_lens), self.lengths(batch_valid_length)
        rows = token_ids, positions, slot_mapping, block_tables, q_seq_lens, batch_valid_length, sample_indices
        arguments = (*rows, *lengths, seen)
        registers = (token_ids,) * NUM_REGISTERS
        for step in self.steps:
            registers = step(registers, arguments)
        return registers[0]


class HeadOfCells(nn.Cell):
    """states float32 [P, H], then `lowering.step.arguments_of_rows` -> logits, float32 [P, V]"""

    def __init__(self, network: Network, backend: Backend, parameters: Parameters) -> None:
        super().__init__()
        head = network.head
        weight = parameters[head.weights["weight"]]
        self.output = cells.Output(backend, weight, *(head.attributes[each] for each in OF_OUTPUT))
        self.dtype = backend.activation_dtype

    def construct(
        self,
        states: ms.Tensor,
        token_ids: ms.Tensor,
        positions: ms.Tensor,
        slot_mapping: ms.Tensor,
        block_tables: ms.Tensor,
        q_seq_lens: ms.Tensor,
        batch_valid_length: ms.Tensor,
        sample_indices: ms.Tensor,
    ) -> ms.Tensor:
        arguments = token_ids, positions, slot_mapping, block_tables, q_seq_lens, batch_valid_length, sample_indices
        return self.output((states.astype(self.dtype),), arguments)[0]


class Step(nn.Cell):
    """Takes what a Cell reads from registers and puts what it writes into others.

    Every place is written out: MindSpore makes a graph of each turn of a loop, and to read the loops of all steps took
    it longer than the rest of a network.

    Args:
        cell: (`MAX_READS` values, arguments of the step) -> tuple of the values written
        reads: Registers, `MAX_READS` at most; the values behind these mean nothing.
        writes: Register -> which of the values written; the others stay as they are.
    """

    def __init__(self, cell: nn.Cell, reads: Sequence[int], writes: Mapping[int, int]) -> None:
        super().__init__()
        self.cell = cell
        self.r, self.s, self.t, self.u = (*reads, *(0,) * (MAX_READS - len(reads)))
        # Among the registers, and behind them the values written.
        places = [NUM_REGISTERS + writes[at] if at in writes else at for at in range(NUM_REGISTERS)]
        self.a, self.b, self.c, self.d, self.e, self.f, self.g, self.h = places

    def construct(self, registers: Registers, arguments: Registers) -> Registers:
        read = registers[self.r], registers[self.s], registers[self.t], registers[self.u]
        x = registers + self.cell(read, arguments)
        return x[self.a], x[self.b], x[self.c], x[self.d], x[self.e], x[self.f], x[self.g], x[self.h]


class _Listing:
    """The Cells of a plan, and the registers between them."""

    def __init__(
        self,
        plan: Plan,
        network: Network,
        backend: Backend,
        parameters: Parameters,
        kv_caches: KVCaches,
        max_positions: int,
        whole_prompts: bool,
    ) -> None:
        self._network, self._backend = network, backend
        self._parameters, self._kv_caches = parameters, kv_caches
        self._max_positions, self._whole_prompts = max_positions, whole_prompts
        listed = _listed(plan.operations, whole_prompts)
        last_read = {x: at for at, each in enumerate(listed) for x in each.reads}
        taken: dict[object, int] = {}
        steps = []
        for at, each in enumerate(listed):
            reads = [taken[x] for x in each.reads]
            for value in [x for x in taken if last_read[x] <= at]:
                del taken[value]
            written = {}
            for which, y in enumerate(each.writes):
                if y in last_read or each.operation.kind in RESULTS:
                    taken[y] = next(i for i in range(len(listed)) if i not in taken.values())
                    written[taken[y]] = which
            for y in each.writes:
                if y not in last_read:
                    taken.pop(y, None)
            steps.append((self._cell(each), reads, written))
        needed = 1 + max(at for _, reads, written in steps for at in (*reads, *written, 0))
        if needed > NUM_REGISTERS:
            raise AssertionError(f"{needed} values are needed at once; there are {NUM_REGISTERS} registers")
        self.cells = [Step(cell, reads, written) for cell, reads, written in steps]
        if 0 not in steps[-1][2]:
            raise AssertionError("the result is not in register 0")

    def _cell(self, each: _Listed) -> nn.Cell:
        operation, backend, parameters = each.operation, self._backend, self._parameters
        attributes = operation.attributes
        wholes = {role: parameters[weight] for role, weight in operation.weights.items()}
        weights = {role: whole[0] for role, whole in wholes.items()}
        match operation.kind:
            case "tables":
                return cells.Tables(backend, weights["cos"], weights["sin"])
            case "split":
                return cells.Split(backend, [view.width for view in each.writes if isinstance(view, Value)])
            case "gather":
                return cells.Gather(backend, wholes["table"], *(attributes[each] for each in OF_GATHER))
            case "linear":
                return cells.Linear(backend, wholes["weight"], weights.get("bias"))
            case "norm" if "added" in operation.inputs:
                return cells.AddNorm(backend, weights["gain"], attributes["eps"])
            case "norm":
                return cells.Norm(backend, weights["gain"], attributes["eps"], attributes["group"])
            case "rotate":
                return cells.Rotate(backend, [x.width for x in operation.inputs.values()], weights_width(operation))
            case "store":
                return cells.Store(backend, self._kv_caches[attributes["layer"]])
            case "attend":
                return self._attend(operation)
            case "activate":
                return cells.Activate(backend, attributes["function"])
            case "add":
                return cells.Add(backend, attributes["scale"])
            case "all_reduce":
                return cells.AllReduce(backend)
            case "weigh":
                return cells.Weigh()
            case "route":
                return cells.Route(backend, weights["weight"], weights.get("correction"), attributes)
            case "experts":
                return cells.Experts(backend, wholes["gate_up"], wholes["down"], attributes["experts"])
            case "select":
                return cells.Select(backend)
            case "output":
                return cells.Output(backend, wholes["weight"], *(attributes[each] for each in OF_OUTPUT))
            case "states":
                return cells.States()
        raise ModelError(f"no Cell computes the operation {operation.kind}")

    def _attend(self, operation: Operation) -> nn.Cell:
        layer, q = operation.attributes["layer"], operation.inputs["q"]
        shape = self._network.caches[layer]
        window, slopes = operation.attributes["window"], operation.weights.get("slopes")
        attention = AttentionShape(
            num_heads=q.width // shape.key_width,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.key_width,
            scale=operation.attributes["scale"],
            window=window if window < self._max_positions else 0,
            cap=operation.attributes["cap"],
        )
        weight = None if slopes is None else self._parameters[slopes][0]
        paged = self._backend.paged_attention(attention, weight)
        if not self._whole_prompts:
            return cells.Attend(paged, self._kv_caches[layer])
        prompts = self._backend.prompt_attention(attention)
        if prompts is None:
            raise ModelError(f"kernels of {self._backend.name} have no attention of their own for whole prompts")
        return cells.AttendPrompts(prompts)


def weights_width(operation: Operation) -> int:
    """Elements of a head of `rotate`."""
    return operation.weights["cos"].shape[1]


class _Listed:
    """An operation, with what it reads and writes: values, views of them, and keys of what is no value."""

    def __init__(self, operation: Operation, reads: Sequence[object], writes: Sequence[object]) -> None:
        self.operation = operation
        self.reads = tuple(reads)
        self.writes = tuple(writes)


def _listed(operations: Sequence[Operation], whole_prompts: bool) -> list[_Listed]:
    """The operations as Cells take them.

    Views become results of a split; cosines and sines are looked up once for all layers; two rotations by the same
    tables, one after the other, are one; attention depends on what was stored before.
    """
    views: dict[Value, dict[tuple[int, int], Value]] = {}
    for each in operations:
        for x in each.inputs.values():
            if x.whole is not None:
                views.setdefault(x.whole, {}).setdefault((x.start, x.width), x)

    def key(x: Value) -> object:
        return x if x.whole is None else views[x.whole][x.start, x.width]

    result: list[_Listed] = []
    tables: set[Weight] = set()
    waiting: Operation | None = None  # a rotation that the next one may join
    for each in operations:
        if waiting is not None:
            joins = each.kind == "rotate" and each.weights == waiting.weights
            pair = (waiting, each) if joins else (waiting,)
            result.append(_rotation(pair, key))
            waiting = None
            if joins:
                continue
        if each.kind == "rotate":
            if each.weights["cos"] not in tables:
                tables.add(each.weights["cos"])
                looked_up = Operation("tables", {}, each.weights, {}, {})
                result.insert(0, _Listed(looked_up, (), (each.weights["cos"], each.weights["sin"])))
            waiting = each
            continue
        reads: list[object] = [key(x) for x in each.inputs.values()]
        writes: list[object] = list(each.outputs.values())
        if each.kind == "norm" and "added" in each.inputs:
            writes = [each.outputs["y"], each.outputs.get("sum")]
        elif each.kind == "store":
            writes = [("stored", each.attributes["layer"])]
        elif each.kind == "attend":
            layer = each.attributes["layer"]
            reads.append(("stored", layer))
            if whole_prompts:
                stored = next(s for s in operations if s.kind == "store" and s.attributes["layer"] == layer)
                reads += [key(stored.inputs[role]) for role in ("k", "v")]
        elif each.kind in RESULTS:
            writes = ["result"]
        result.append(_Listed(each, reads, writes))
        for y in each.outputs.values():
            if y in views:
                ordered = [views[y][at] for at in sorted(views[y])]
                result.append(_Listed(Operation("split", {"x": y}, {}, {}, {}), (y,), ordered))
    return result


def _rotation(operations: Sequence[Operation], key: Callable[[Value], object]) -> _Listed:
    inputs = {f"x{index}": each.inputs["x"] for index, each in enumerate(operations)}
    together = Operation("rotate", inputs, operations[0].weights, {}, {})
    tables = operations[0].weights["cos"], operations[0].weights["sin"]
    reads = [*(key(x) for x in inputs.values()), *tables]
    return _Listed(together, reads, [each.outputs["y"] for each in operations])
