"""The encoding of a network as integers, a program that the C++ operator library (`kernels/csrc`) executes.

An instruction is the number of an operation, followed by its outputs, inputs, weights and attributes in the order of
`SIGNATURES`. -1 marks one that is absent. Non-integer numbers are stored as the bits of a float32. Outputs and inputs
are indices of operands. An operand is a column range of a buffer. All buffers share one memory block, whose size is
proportional to the number of rows in a step. So the program stores the offset of a buffer in bytes per row, and the
operator library multiplies it by the number of rows. Row 0 of the instructions is a header.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from llm_serving.core.step import Int32Array
from llm_serving.network.builder import Network
from llm_serving.network.caches import CacheLayout
from llm_serving.network.operations import BY_TOKEN, ELEMENT_BYTES, SIGNATURES, Operation, Value, Weight, rounded_to
from llm_serving.network.rewriting import Plan, rewrite, select_rows

VERSION: Final = 12
KINDS: Final = tuple(SIGNATURES)
INSTRUCTION_LENGTH: Final = 1 + max(
    len(each.outputs) + len(each.inputs) + len(each.weights) + len(each.attributes) for each in SIGNATURES.values()
)
FUNCTIONS: Final = ("", "silu", "gelu_tanh", "gelu", "clamped", "sigmoid", "tanh", "relu", "relu2")
SCORES: Final = ("softmax", "sigmoid", "sparsemixer")
FLOATS: Final = ("scale", "cap", "eps", "low", "high", "margin", "offset")
DTYPES: Final = ("float32", "float16", "bfloat16")

_ABSENT: Final = -1
_TILED_COLUMNS: Final = 1024
"""Buffers in a tiled layout are padded to a multiple of this many columns: kMaxPassWidth of csrc/tiled_layout.h."""

# An output may reuse the buffer of an input that no later operation reads: each element is read before it is written.
_IN_PLACE: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "linear": {"y": ("residual",)},
    "experts": {"y": ("residual",)},
    "rms_norm": {"residual_out": ("residual", "x")},
    "add": {"y": ("a", "b")},
    "all_reduce": {"y": ("x",)},
}


@dataclass(frozen=True)
class Program:
    """A network encoded as integers.

    Attributes:
        instructions: int32 [1 + n, INSTRUCTION_LENGTH] for n operations. Row 0 holds VERSION, number of weights, number
            of caches, bytes of memory per row, INSTRUCTION_LENGTH, index of the model dtype in DTYPES, number of
            states, and number of adapter slots.
        operands: int32 [m, 6]. The first two columns are the buffer's offset in bytes per row and its number of
            columns. The others are the operand's first column, its number of columns, whether it has only the sampled
            rows (1 or 0), and its type (0 model dtype, 1 float32, 2 int32).
        weights: The weights in the order of their numbers; the head's weights come first.
    """

    instructions: Int32Array
    operands: Int32Array
    weights: tuple[Weight, ...]


def build_program(network: Network, dtype: str) -> Program:
    return assemble(rewrite(select_rows(network.operations)), dtype, network)


def build_hidden_states_program(network: Network, dtype: str) -> Program:
    return assemble(rewrite(select_rows(network.hidden_states())), dtype, network)


def build_head_program(network: Network, dtype: str) -> Program:
    """Build the program that computes logits or scores from given hidden states. The caller passes the hidden states as
    the program's last weight, and their row indices as token ids.
    """
    return _of_given_rows(network.head_input, network.head_operations, dtype)


def build_given_rows_program(network: Network, dtype: str) -> Program:
    """Build the program of an MTP layer or the like. The caller passes input rows as in `build_head_program`."""
    assert network.given is not None
    return _of_given_rows(network.given, network.operations, dtype, network)


def build_embedding_program(network: Network, dtype: str) -> Program:
    first = network.operations[0]
    result = Operation("hidden_states", {"x": first.outputs["y"]}, {}, {}, {})
    return assemble(rewrite(select_rows([first, result])), dtype, first=list(first.weights.values()))


def _of_given_rows(
    given: Value, operations: Sequence[Operation], dtype: str, network: Network | None = None
) -> Program:
    table = {"table": Weight(("given_rows",), (0, given.width))}
    lookup = Operation("embedding", {}, table, {"y": given}, BY_TOKEN)
    matrices_first = sorted(operations, key=lambda each: each.kind != "linear")  # weight 0 must be a matrix
    first = [weight for each in matrices_first for weight in each.weights.values()]
    return assemble(rewrite(select_rows([lookup, *operations])), dtype, network, first)


def assemble(plan: Plan, dtype: str, network: Network | None = None, first: Sequence[Weight] = ()) -> Program:
    """Encode the operations of a plan as a program. `network`: has their caches, states and adapter slots. None if
    they use none. `first`: weights that get the lowest numbers, by default those of the last operation.
    """
    layout = None if network is None else network.layout
    memory = ProgramMemory(plan.operations, ELEMENT_BYTES[dtype])
    first = first or list(plan.operations[-1].weights.values())
    weights: dict[Weight, int] = {weight: number for number, weight in enumerate(dict.fromkeys(first))}
    operands: dict[tuple[int, ...], int] = {}

    def operand(value: Value | None) -> int:
        if value is None:
            return _ABSENT
        offset, columns = memory.offsets[value.root], value.root.width
        selected, kind = int(value.root in plan.selected), ("model", "float32", "int32").index(value.dtype)
        return operands.setdefault((offset, columns, value.start, value.width, selected, kind), len(operands))

    def number(weight: Weight | None) -> int:
        return _ABSENT if weight is None else weights.setdefault(weight, len(weights))

    instructions = np.full((1 + len(plan.operations), INSTRUCTION_LENGTH), _ABSENT, np.int32)
    for row, each in zip(instructions[1:], plan.operations, strict=True):
        signature = SIGNATURES[each.kind]
        words = [
            KINDS.index(each.kind),
            *(operand(each.outputs.get(role)) for role in signature.outputs),
            *(operand(each.inputs.get(role)) for role in signature.inputs),
            *(number(each.weights.get(role)) for role in signature.weights),
            *(_encode_attribute(role, each, number, dtype, layout) for role in signature.attributes),
        ]
        row[: len(words)] = words
    instructions[0, :8] = (
        VERSION,
        len(weights),
        0 if network is None else network.num_caches,
        memory.bytes_per_row,
        INSTRUCTION_LENGTH,
        DTYPES.index(dtype),
        0 if network is None else len(network.states),
        0 if network is None else network.num_adapter_slots,
    )
    return Program(instructions, np.array(list(operands), np.int32), tuple(weights))


class ProgramMemory:
    """The memory layout of a program. Values that do not exist at the same time share memory."""

    def __init__(self, operations: Sequence[Operation], dtype_bytes: int) -> None:
        self._dtype_bytes = dtype_bytes
        written: dict[Value, int] = {}
        last_read: dict[Value, int] = {}
        for at, each in enumerate(operations):
            for value in (*each.inputs.values(), *each.outputs.values()):
                last_read[value.root] = at
            for value in each.outputs.values():
                written[value] = at
        self._tiled = {y for each in operations if "consumer" in each.weights for y in (each.outputs["y"],)}
        owner = self._owners(operations, written, last_read)
        spans: dict[Value, tuple[int, int]] = {}
        for y, at in written.items():
            first, last = spans.get(owner[y], (at, at))
            spans[owner[y]] = min(first, at), max(last, last_read[y])
        buffers = _assign_offsets(spans, {each: self._bytes(each) for each in spans})
        self.offsets = {y: buffers[owner[y]] for y in written}
        self.bytes_per_row = max(buffers[each] + self._bytes(each) for each in spans)

    def _owners(
        self, operations: Sequence[Operation], written: Mapping[Value, int], last_read: Mapping[Value, int]
    ) -> dict[Value, Value]:
        owner = {y: y for y in written}
        taken: set[Value] = set()
        for at, each in enumerate(operations):
            for role, y in each.outputs.items():
                for x in (each.inputs.get(name) for name in _IN_PLACE.get(each.kind, {}).get(role, ())):
                    free = x is not None and x in written and last_read[x] == at and x not in taken
                    if x is not None and free and self._bytes(x) == self._bytes(y) and not self._tiled & {x, y}:
                        owner[y] = owner[x]
                        taken.add(x)
                        break
        return owner

    def _bytes(self, value: Value) -> int:
        columns = -(-value.width // _TILED_COLUMNS) * _TILED_COLUMNS if value in self._tiled else value.width
        size = columns * (self._dtype_bytes if value.dtype == "model" else 4)
        return -(-size // 4) * 4


def _assign_offsets(spans: Mapping[Value, tuple[int, int]], sizes: Mapping[Value, int]) -> dict[Value, int]:
    offsets: dict[Value, int] = {}
    for buffer in sorted(spans, key=lambda each: -sizes[each]):
        first, last = spans[buffer]
        begin = 0
        for other in sorted(offsets, key=offsets.__getitem__):
            together = spans[other][0] <= last and spans[other][1] >= first
            if together and offsets[other] < begin + sizes[buffer]:
                begin = max(begin, offsets[other] + sizes[other])
        offsets[buffer] = begin
    return offsets


def _encode_attribute(
    role: str, operation: Operation, number: Callable[[Weight | None], int], dtype: str, layout: CacheLayout | None
) -> int:
    if role == "consumer":
        return number(operation.weights.get("consumer"))
    if role in ("layer", "layer_group"):
        layer = operation.attributes["layer"]
        group, cache = (0, layer) if layout is None else layout.layer_tensors[layer]
        return int(group if role == "layer_group" else cache)
    value = operation.attributes[role]
    if role in ("function", "score"):
        return (FUNCTIONS if role == "function" else SCORES).index(value)
    if role in FLOATS:
        exact = np.float32(value)
        rounded = rounded_to(exact, dtype) if operation.attributes.get("rounded_scale") else exact
        return int(rounded.view(np.int32))
    return int(value)
