"""A network as integers: instructions, the operands they name, and weights. What runs it knows operations only.

An instruction is the number of its operation, then its outputs, inputs, weights and attributes in the order of
`SIGNATURES`; -1 stands for what is absent, and numbers that are not whole travel as the bits of their float32. An
operand is columns of a buffer. All buffers lie in one piece of memory, whose size is so many bytes for each row of a
step: the place of each is known before any step is. The first row of the instructions says how many there are of what.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llm_serving.network.builder import Network
from llm_serving.network.operations import ELEMENT_BYTES, SIGNATURES, Operation, Value, Weight, rounded_to
from llm_serving.network.rewriting import Plan, rewrite, select_rows

Int32Array = NDArray[np.int32]

VERSION: Final = 3
KINDS: Final = tuple(SIGNATURES)
LENGTH: Final = 1 + max(
    len(each.outputs) + len(each.inputs) + len(each.weights) + len(each.attributes) for each in SIGNATURES.values()
)
FUNCTIONS: Final = ("", "silu", "gelu_tanh")
SCORES: Final = ("softmax", "sigmoid")
DTYPES: Final = ("float32", "float16", "bfloat16")

_ABSENT: Final = -1
_PASS: Final = 1024
"""Columns in whose multiples a buffer is cut whose reader orders it; as kMostPassWidth of csrc/passes.h."""

# An output may take the place of an input that nothing reads afterwards: each element is read before it is written.
_IN_PLACE: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "linear": {"y": ("added",)},
    "experts": {"y": ("added",)},
    "norm": {"sum": ("added", "x")},
    "add": {"y": ("a", "b")},
    "all_reduce": {"y": ("x",)},
}


@dataclass(frozen=True)
class Program:
    """
    Attributes:
        instructions: int32 [1 + n, LENGTH]; row 0 is VERSION, weights, caches, bytes of memory for a row, LENGTH and
            the number of the model dtype in DTYPES.
        operands: int32 [m, 6]: place of the buffer in bytes for each row, its columns, first column and columns of the
            operand, whether it has only the rows that give a result, and its kind (0 model, 1 float32, 2 int32).
        weights: What instructions number; the head comes first.
    """

    instructions: Int32Array
    operands: Int32Array
    weights: tuple[Weight, ...]

    @property
    def bytes_per_row(self) -> int:
        return int(self.instructions[0, 3])


def program_of(network: Network, dtype: str) -> Program:
    """The shortest program of a network.

    Args:
        network: The description.
        dtype: The model dtype: float32, bfloat16 or float16.
    """
    return assemble(rewrite(select_rows(network.operations)), len(network.caches), dtype)


def program_of_states(network: Network, dtype: str) -> Program:
    """As `program_of`, but what the head would read is the result."""
    plan = rewrite(select_rows(network.states()))
    return assemble(plan, len(network.caches), dtype, network.head.weights["weight"])


def program_of_head(network: Network, dtype: str) -> Program:
    """From rows of states, given as its last weight and named by token, to their logits."""
    rows = Value("rows", network.hidden)
    states = Weight(("states",), (0, network.hidden))
    given = Operation("gather", {}, {"table": states}, {"y": rows}, {"scale": 1.0, "first": 0, "rows": 0})
    return assemble(rewrite(select_rows([given, network.head.changed(inputs={"x": rows})])), 0, dtype)


def assemble(plan: Plan, num_caches: int, dtype: str, head: Weight | None = None) -> Program:
    """Numbers everything that the operations of a plan name.

    Args:
        plan: What the program is to do.
        num_caches: Layers of the network.
        dtype: The model dtype.
        head: The weight that makes logits; of an `output` it is known.
    """
    memory = Memory(plan.operations, ELEMENT_BYTES[dtype])
    head = head or plan.operations[-1].weights["weight"]
    weights: dict[Weight, int] = {head: 0}
    operands: dict[tuple[int, ...], int] = {}

    def operand(value: Value | None) -> int:
        if value is None:
            return _ABSENT
        place, columns = memory.places[value.root], value.root.width
        selected, kind = int(value.root in plan.selected), ("model", "float32", "int32").index(value.kind)
        return operands.setdefault((place, columns, value.start, value.width, selected, kind), len(operands))

    def number(weight: Weight | None) -> int:
        return _ABSENT if weight is None else weights.setdefault(weight, len(weights))

    instructions = np.full((1 + len(plan.operations), LENGTH), _ABSENT, np.int32)
    for row, each in zip(instructions[1:], plan.operations, strict=True):
        signature = SIGNATURES[each.kind]
        words = [
            KINDS.index(each.kind),
            *(operand(each.outputs.get(role)) for role in signature.outputs),
            *(operand(each.inputs.get(role)) for role in signature.inputs),
            *(number(each.weights.get(role)) for role in signature.weights),
            *(_word(role, each, number, dtype) for role in signature.attributes),
        ]
        row[: len(words)] = words
    instructions[0, :6] = VERSION, len(weights), num_caches, memory.bytes_per_row, LENGTH, DTYPES.index(dtype)
    return Program(instructions, np.array(list(operands), np.int32), tuple(weights))


class Memory:
    """Where each value lies: values that are not needed at the same time share a place.

    Attributes:
        places: First byte, for each row of a step.
        bytes_per_row: Of all.
    """

    def __init__(self, operations: Sequence[Operation], dtype_bytes: int) -> None:
        self._dtype_bytes = dtype_bytes
        written: dict[Value, int] = {}
        last_read: dict[Value, int] = {}
        for at, each in enumerate(operations):
            for value in (*each.inputs.values(), *each.outputs.values()):
                last_read[value.root] = at
            for value in each.outputs.values():
                written[value] = at
        self._ordered = {y for each in operations if "reader" in each.weights for y in (each.outputs["y"],)}
        owner = self._owners(operations, written, last_read)
        spans: dict[Value, tuple[int, int]] = {}
        for y, at in written.items():
            first, last = spans.get(owner[y], (at, at))
            spans[owner[y]] = min(first, at), max(last, last_read[y])
        buffers = _placed(spans, {each: self._bytes(each) for each in spans})
        self.places = {y: buffers[owner[y]] for y in written}
        self.bytes_per_row = max(buffers[each] + self._bytes(each) for each in spans)

    def _owners(
        self, operations: Sequence[Operation], written: Mapping[Value, int], last_read: Mapping[Value, int]
    ) -> dict[Value, Value]:
        """The first of the values that take one place after the other."""
        owner = {y: y for y in written}
        taken: set[Value] = set()
        for at, each in enumerate(operations):
            for role, y in each.outputs.items():
                for x in (each.inputs.get(name) for name in _IN_PLACE.get(each.kind, {}).get(role, ())):
                    free = x is not None and x in written and last_read[x] == at and x not in taken
                    if x is not None and free and self._bytes(x) == self._bytes(y) and not self._ordered & {x, y}:
                        owner[y] = owner[x]
                        taken.add(x)
                        break
        return owner

    def _bytes(self, value: Value) -> int:
        """Of a row of a buffer: whole float32s, so that sixteen rows are whole cache lines."""
        columns = -(-value.width // _PASS) * _PASS if value in self._ordered else value.width
        size = columns * (self._dtype_bytes if value.kind == "model" else 4)
        return -(-size // 4) * 4


def _placed(spans: Mapping[Value, tuple[int, int]], sizes: Mapping[Value, int]) -> dict[Value, int]:
    """A place for each buffer, apart from those that are needed at the same time; wide ones find theirs first."""
    places: dict[Value, int] = {}
    for buffer in sorted(spans, key=lambda each: -sizes[each]):
        first, last = spans[buffer]
        begin = 0
        for other in sorted(places, key=places.__getitem__):
            together = spans[other][0] <= last and spans[other][1] >= first
            if together and places[other] < begin + sizes[buffer]:
                begin = max(begin, places[other] + sizes[other])
        places[buffer] = begin
    return places


def _word(role: str, operation: Operation, number: Callable[[Weight | None], int], dtype: str) -> int:
    """An attribute as an integer."""
    if role == "reader":
        return number(operation.weights.get("reader"))
    value = operation.attributes[role]
    if role in ("function", "score"):
        return (FUNCTIONS if role == "function" else SCORES).index(value)
    if role in ("scale", "cap", "eps"):
        exact = np.float32(value)
        rounded = rounded_to(exact, dtype) if operation.attributes.get("rounded_scale") else exact
        return int(rounded.view(np.int32))
    return int(value)
