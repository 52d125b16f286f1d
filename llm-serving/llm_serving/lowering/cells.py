"""A network as a MindSpore graph with one Cell (`nn.Cell`) for each operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import mindspore as ms
from mindspore import nn, ops
from mindspore.ops.auto_generate import gen_ops_prim

from llm_serving.backends.base import AttentionShape, Backend
from llm_serving.backends.token_drawing import NUM_PARAMETERS
from llm_serving.errors import ModelError
from llm_serving.lowering import operations as cells
from llm_serving.lowering.parameters import Parameters
from llm_serving.lowering.step_inputs import (
    NUM_TOKEN_ARRAYS,
    NUM_TOKEN_COLUMNS,
    SINGLE_TOKEN_INPUTS,
    TOKEN_ROW_INPUTS,
    KVCaches,
)
from llm_serving.network.builder import Network
from llm_serving.network.operations import Operation, Value, Weight
from llm_serving.network.rewriting import Plan, apply, fuse_residual_into_norm, select_rows

RESULTS: Final = ("lm_head", "hidden_states")
"""Kinds of operations that can be the last one of a network. The value that they write is the network's result."""

EMBEDDING_ATTRIBUTES: Final = ("scale", "rounded_scale", "first", "rows")
LM_HEAD_ATTRIBUTES: Final = ("scale", "cap", "first", "rows")

MAX_READS: Final = 4
NUM_REGISTERS: Final = 8
"""Maximum number of live values, which are results that a later operation still reads."""

Registers = Any
"""A tuple of tensors. It has no type, because MindSpore compiles the functions that take it."""


class CellNetwork(nn.Cell):
    """Computes logits, float32 [S, V], or hidden states, float32 [S, H], from the inputs of a step.

    S is the number of sampled rows, V the size of the vocabulary, and H the width of a hidden state. The inputs are
    `lowering.step_inputs.STEP_INPUTS` and, with adapters, `ADAPTER_INPUT`. Raise ModelError if the backend lacks an
    operation of the network.

    Args:
        max_positions: Longest context of a request, in tokens.
        whole_prompts: Whether the graph computes only steps of whole prompts. The number of requests B is then fixed,
            and a step with fewer has requests of length 0.
        of_states: Whether the results are hidden states, which are the input of the LM head, instead of logits.
        single_tokens: Whether the graph computes only steps with one token per request. Attention then has no mask.
        all_rows: Whether the result has a row for each token. Then there are no `sample_indices`.
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
        single_tokens: bool = False,
        all_rows: bool = False,
    ) -> None:
        super().__init__()
        lacks = backend.unsupported(network, max_positions)
        if lacks is not None:
            raise ModelError(f"the Cells of {backend.name} do not support {lacks}; use `kernels: program`")
        operations = network.hidden_states() if of_states else network.operations
        rows = Plan(list(operations), frozenset()) if all_rows else select_rows(operations)
        plan = apply(rows, (fuse_residual_into_norm,))
        masked = not single_tokens
        self.attention_mask = backend.attention_mask(max_positions, kv_caches[0][0].shape[1]) if masked else NoMask()
        listing = _Schedule(plan, network, backend, parameters, kv_caches, max_positions, whole_prompts)
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
        adapter_slots: ms.Tensor | None = None,
    ) -> ms.Tensor:
        seen = self.attention_mask(positions, block_tables)
        rows = token_ids, positions, slot_mapping, block_tables, q_seq_lens, batch_valid_length, sample_indices
        arguments = (*rows, seen, adapter_slots)
        registers = (token_ids,) * NUM_REGISTERS
        for step in self.steps:
            registers = step(registers, arguments)
        return registers[0]


class NoMask(nn.Cell):
    def construct(self, positions: ms.Tensor, block_tables: ms.Tensor) -> None:
        return None


class TokenNetwork(nn.Cell):
    """A network for steps in which each request computes at most one token.

    It returns the logits, float32 [S, V], the result of `Backend.largest_logits` for them, and the sampling parameters
    of each sample (`TokenDrawing`), int32 [S, 15]. `network`: a `CellNetwork` with `single_tokens`.
    """

    inputs: Sequence[tuple[str, int]]

    def __init__(self, network: nn.Cell, backend: Backend) -> None:
        super().__init__()
        largest = backend.largest_logits()
        assert largest is not None
        self.network, self.largest = network, largest
        self.of_tokens, self.of_tables = backend.columns(0, NUM_TOKEN_COLUMNS), backend.columns(NUM_TOKEN_COLUMNS)
        self.split, self.reshape = gen_ops_prim.SplitWithSize(), ops.Reshape()
        self.concat, self.gather = ops.Concat(0), gen_ops_prim.Gather()
        self.widths = (*(1,) * NUM_TOKEN_ARRAYS, NUM_PARAMETERS)

    def arrays_of(self, step: ms.Tensor, previous: ms.Tensor) -> Any:
        """Split `step` into token ids, positions and KV slots, [T] each, and sampling parameters, [T, 15]. Ids that
        `step` lacks are taken from `previous`, the samples of the previous step (see `SINGLE_TOKEN_INPUTS`).
        """
        given, positions, slots, sources, parameters = self.split(self.of_tokens(step), self.widths, 1)
        known = self.concat((previous, self.reshape(given, (-1,))))
        token_ids = self.gather(known, self.reshape(sources, (-1,)), 0)
        return token_ids, self.reshape(positions, (-1,)), self.reshape(slots, (-1,)), parameters


class SingleTokenNetwork(TokenNetwork):
    """A network for steps in which each request has one token, which is sampled. `network` must have `all_rows`."""

    inputs = SINGLE_TOKEN_INPUTS

    def construct(self, step: ms.Tensor, previous: ms.Tensor, batch_valid_length: ms.Tensor) -> Any:
        token_ids, positions, slots, parameters = self.arrays_of(step, previous)
        logits = self.network(token_ids, positions, slots, self.of_tables(step), None, batch_valid_length, None)
        ids, largest = self.largest(logits)
        return logits, ids, largest, parameters


class TokenRowsNetwork(TokenNetwork):
    """A network for steps in which the last requests have no token, or some tokens are not sampled."""

    inputs = TOKEN_ROW_INPUTS

    def construct(
        self,
        step: ms.Tensor,
        previous: ms.Tensor,
        batch_valid_length: ms.Tensor,
        q_seq_lens: ms.Tensor,
        table_rows: ms.Tensor,
        sample_indices: ms.Tensor,
    ) -> Any:
        token_ids, positions, slots, parameters = self.arrays_of(step, previous)
        tables = self.gather(self.of_tables(step), table_rows, 0)
        logits = self.network(token_ids, positions, slots, tables, q_seq_lens, batch_valid_length, sample_indices)
        ids, largest = self.largest(logits)
        return logits, ids, largest, self.gather(parameters, sample_indices, 0)


class CellLmHead(nn.Cell):
    """Computes logits, float32 [P, V], from hidden states [P, H]. Its other inputs are `step_inputs_for_rows(P)`."""

    def __init__(self, network: Network, backend: Backend, parameters: Parameters) -> None:
        super().__init__()
        head = network.head
        weight = parameters[head.weights["weight"]]
        self.output = cells.LmHeadCell(backend, weight, *(head.attributes[each] for each in LM_HEAD_ATTRIBUTES))
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


class RegisterStep(nn.Cell):
    """Runs `cell` and stores its results in registers: `NUM_REGISTERS` tensors that later Cells read.

    `reads`: indices of the registers that `cell` reads. `writes`: index of a register -> index of the result of `cell`
    that is stored in it. The code has no loop over registers, because MindSpore compiles loops slowly.
    """

    def __init__(self, cell: nn.Cell, reads: Sequence[int], writes: Mapping[int, int]) -> None:
        super().__init__()
        self.cell = cell
        self.r, self.s, self.t, self.u = (*reads, *(0,) * (MAX_READS - len(reads)))
        # Indices into a tuple of all registers and, after them, the values that `cell` returns.
        sources = [NUM_REGISTERS + writes[at] if at in writes else at for at in range(NUM_REGISTERS)]
        self.a, self.b, self.c, self.d, self.e, self.f, self.g, self.h = sources

    def construct(self, registers: Registers, arguments: Registers) -> Registers:
        read = registers[self.r], registers[self.s], registers[self.t], registers[self.u]
        x = registers + self.cell(read, arguments)
        return x[self.a], x[self.b], x[self.c], x[self.d], x[self.e], x[self.f], x[self.g], x[self.h]


class _Schedule:
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
        self._selected = plan.selected
        listed = _schedule(plan.operations, whole_prompts)
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
            raise AssertionError(f"the network has {needed} live values at once, but only {NUM_REGISTERS} registers")
        self.cells = [RegisterStep(cell, reads, written) for cell, reads, written in steps]
        if 0 not in steps[-1][2]:
            raise AssertionError("the result is not in register 0")

    def _cell(self, each: _ScheduledOperation) -> nn.Cell:
        operation, backend, parameters = each.operation, self._backend, self._parameters
        attributes = operation.attributes
        wholes = {role: parameters[weight] for role, weight in operation.weights.items()}
        weights = {role: whole[0] for role, whole in wholes.items()}
        match operation.kind:
            case "tables":
                return cells.CosSinCell(backend, weights["cos"], weights["sin"])
            case "split":
                return cells.SplitCell(backend, [view.width for view in each.writes if isinstance(view, Value)])
            case "embedding":
                return cells.EmbeddingCell(
                    backend, wholes["table"], *(attributes[each] for each in EMBEDDING_ATTRIBUTES)
                )
            case "linear":
                change = None
                if "a" in weights:
                    selected = operation.outputs["y"] in self._selected
                    slots = self._network.num_adapter_slots
                    change = cells.LowRankCell(backend, weights["a"], weights["b"], slots, selected)
                return cells.LinearCell(backend, wholes["weight"], weights.get("bias"), change)
            case "rms_norm" if "residual" in operation.inputs:
                return cells.AddRmsNormCell(backend, weights["gamma"], attributes["eps"])
            case "rms_norm":
                return cells.RmsNormCell(backend, weights["gamma"], attributes["eps"], attributes["group"])
            case "rope":
                head_dim = operation.weights["cos"].shape[1]
                return cells.RopeCell(backend, [x.width for x in operation.inputs.values()], head_dim)
            case "store_kv":
                return cells.StoreKVCell(backend, self._kv_caches[attributes["layer"]])
            case "attention":
                return self._attend(operation)
            case "gated_activation":
                is_silu = attributes["function"] == "silu"
                return cells.OneTensorCell(backend.swiglu() if is_silu else cells.GeluTanhGate())
            case "add":
                return cells.AddCell(backend, attributes["scale"])
            case "all_reduce":
                return cells.OneTensorCell(backend.all_reduce())
            case "sigmoid_gate":
                return cells.SigmoidGateCell()
            case "route":
                return cells.RouteCell(backend, weights["weight"], weights.get("correction"), attributes)
            case "experts":
                return cells.ExpertsCell(backend, wholes["gate_up"], wholes["down"], attributes["experts"])
            case "select_rows":
                return cells.SelectRowsCell(backend)
            case "lm_head":
                return cells.LmHeadCell(backend, wholes["weight"], *(attributes[each] for each in LM_HEAD_ATTRIBUTES))
            case "hidden_states":
                return cells.HiddenStatesCell()
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
            return cells.AttentionCell(paged, self._kv_caches[layer])
        prompts = self._backend.prompt_attention(attention)
        if prompts is None:
            raise ModelError(f"the kernels of {self._backend.name} do not support a separate graph for whole prompts")
        return cells.PromptAttentionCell(prompts)


class _ScheduledOperation(NamedTuple):
    """An operation, and what it reads and writes: values, column ranges of values, or the KV caches of layers."""

    operation: Operation
    reads: Sequence[object]
    writes: Sequence[object]


def _schedule(operations: Sequence[Operation], whole_prompts: bool) -> list[_ScheduledOperation]:
    """Return the operations in the form in which Cells compute them: values are split into the column ranges that are
    read, cosines and sines are looked up once, two rotations by one table become one, and attention follows `store_kv`.
    """
    views: dict[Value, dict[tuple[int, int], Value]] = {}
    for each in operations:
        for x in each.inputs.values():
            if x.base is not None:
                views.setdefault(x.base, {}).setdefault((x.start, x.width), x)

    def key(x: Value) -> object:
        return x if x.base is None else views[x.base][x.start, x.width]

    result: list[_ScheduledOperation] = []
    tables: set[Weight] = set()
    waiting: Operation | None = None  # a rotation that may merge with the next operation
    for each in operations:
        if waiting is not None:
            joins = each.kind == "rope" and _tables(each) == _tables(waiting)
            pair = (waiting, each) if joins else (waiting,)
            result.append(_rotation(pair, key))
            waiting = None
            if joins:
                continue
        if each.kind == "rope":
            if each.weights["cos"] not in tables:
                tables.add(each.weights["cos"])
                looked_up = Operation("tables", {}, _tables(each), {}, {})
                result.insert(0, _ScheduledOperation(looked_up, (), tuple(looked_up.weights.values())))
            waiting = each
            continue
        reads: list[object] = [key(x) for x in each.inputs.values()]
        writes: list[object] = list(each.outputs.values())
        if each.kind == "rms_norm" and "residual" in each.inputs:
            writes = [each.outputs["y"], each.outputs.get("residual_out")]
        elif each.kind == "store_kv":
            writes = [("stored", each.attributes["layer"])]
        elif each.kind == "attention":
            layer = each.attributes["layer"]
            reads.append(("stored", layer))
            if whole_prompts:
                stored = next(s for s in operations if s.kind == "store_kv" and s.attributes["layer"] == layer)
                reads += [key(stored.inputs[role]) for role in ("k", "v")]
        elif each.kind in RESULTS:
            writes = ["result"]
        result.append(_ScheduledOperation(each, reads, writes))
        for y in each.outputs.values():
            if y in views:
                ordered = [views[y][at] for at in sorted(views[y])]
                result.append(_ScheduledOperation(Operation("split", {"x": y}, {}, {}, {}), (y,), ordered))
    return result


def _rotation(operations: Sequence[Operation], key: Callable[[Value], object]) -> _ScheduledOperation:
    inputs = {f"x{index}": each.inputs["x"] for index, each in enumerate(operations)}
    together = Operation("rope", inputs, _tables(operations[0]), {}, {})
    reads = [*(key(x) for x in inputs.values()), *together.weights.values()]
    return _ScheduledOperation(together, reads, [each.outputs["y"] for each in operations])


def _tables(rope: Operation) -> dict[str, Weight]:
    return {role: rope.weights[role] for role in ("cos", "sin")}
