"""Products whose rows have adapters. All numbers are small integers, so that sums are exact and results have one value,
in which only the rounding of A x and of the result shows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from llm_serving.formats.peft import LowRankChange
from llm_serving.kernels import library
from llm_serving.network.adapters import AdaptedLinear, panels, with_adapters
from llm_serving.network.builder import Network
from llm_serving.network.program import assemble
from llm_serving.network.rewriting import select_rows
from support.kernel_calls import FLOAT_TYPES, Array, integers, typed
from support.kernels import reference
from support.program_calls import Runnable, parameters, runnable_of, status_of_program
from support.single_operations import step_of_rows

NAMES, HEIGHTS = ("one", "two", "three"), (64, 32, 32)
RANKS = ({"one": 5, "two": 5, "three": 5}, {"two": 16}, {"one": 33, "three": 2})
"""Rank of each tensor's change, by slot."""
NUM_ROWS, INPUTS, WIDTH = 40, 70, sum(HEIGHTS)
SLOTS = [(-1, 0, 1, 2, 0)[row // 2 % 5] if row < 20 else 2 for row in range(NUM_ROWS)]


class Case(NamedTuple):
    """A product of `x` and `weight` with slots."""

    x: Array
    weight: Array
    changes: Sequence[dict[str, LowRankChange]]
    net: Network
    linear: AdaptedLinear

    def runnable(self, dtype: str, *, fused: bool = True) -> Runnable:
        linear, in_pairs = self.linear, dtype == "bfloat16"
        arrays = {each: np.zeros(each.shape) for each in (linear.a, linear.b, linear.ranks)}
        arrays |= {
            each: np.eye(self.net.head_input.width) for each in self.net.weights if each.names == ("head.weight",)
        }
        arrays |= {each: self.x for each in self.net.weights if each.names == ("x.weight",)}
        arrays |= {linear.weight: self.weight, linear.parts: np.array(linear.part_of_panel)}
        high = linear.b.shape[2] // 16
        for slot, changes in enumerate(self.changes):
            for part, (a, b) in enumerate(linear.matrices(changes)):
                of_a, of_b = panels(a, in_pairs=in_pairs), panels(b, in_pairs=in_pairs)
                at = np.flatnonzero(np.array(linear.part_of_panel) == part)
                arrays[linear.a][slot, part * high : part * high + len(of_a)] = of_a
                arrays[linear.b][slot, at, : of_b.shape[1]] = of_b[at]
                arrays[linear.ranks][slot, part] = len(a)
        with library.use_isa("plain"):  # this instruction set does not repack weights
            runnable = runnable_of(self.net, arrays, dtype)
        if fused:
            return runnable
        program = assemble(select_rows(self.net.operations), dtype, self.net)
        assert program.weights == runnable.program.weights
        return Runnable(program, runnable.weights, dtype)


def create_case(*, gated: bool = False) -> Case:
    rng = np.random.default_rng(3)
    net = Network(INPUTS, NUM_ROWS)
    product = net.linear(net.embedding("x"), NAMES, HEIGHTS)
    net.lm_head(net.gated_activation(product, "silu") if gated else product, "head")
    net, (linear,) = with_adapters(net, len(RANKS), 33, as_program=True)
    changes = [
        {
            name: LowRankChange(rng.integers(-8, 9, (rank, INPUTS)), rng.integers(-2, 3, (height, rank)), 0.5)
            for name, height in zip(NAMES, HEIGHTS, strict=True)
            if (rank := ranks.get(name))
        }
        for ranks in RANKS
    ]
    x, weight = 24 * rng.integers(-4, 5, (NUM_ROWS, INPUTS)), rng.integers(-2, 3, (WIDTH, INPUTS))
    return Case(x, weight, changes, net, linear)


def run(runnable: Runnable, slots: Sequence[int], rows: Sequence[int] = range(NUM_ROWS)) -> Array:
    """Return the bits of the results of rows of x with these slots."""
    step = step_of_rows(len(rows))
    step.token_ids[:] = rows
    given = parameters(runnable, step, [])
    result = given.pop("result")
    given |= {"adapter_slots": integers(slots), "result": result}
    assert status_of_program(given) == 0, library.last_error()
    return result.bits


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_rows_with_adapters_equal_the_reference(isa: str, dtype: str) -> None:
    case = create_case()
    expected = np.empty((NUM_ROWS, WIDTH))
    for slot in (-1, 0, 1, 2):
        rows = np.flatnonzero(np.array(SLOTS) == slot)
        expected[rows] = reference.linear(case.x[rows], case.weight)
        for first, name in zip(np.cumsum((0, *HEIGHTS)), NAMES, strict=False):
            change = case.changes[slot].get(name) if slot >= 0 else None
            if change is not None:
                columns = slice(first, first + len(change.b))
                given = case.x[rows], case.weight[columns], change.a, change.scale * change.b
                expected[rows, columns] = reference.lora(*given, lambda sums: typed(sums, dtype).values)
    assert np.array_equal(run(case.runnable(dtype), SLOTS), typed(typed(expected, dtype).values, "float32").bits)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("gated", [False, True])
def test_bits_depend_on_the_row_and_its_adapter_alone(isa: str, dtype: str, gated: bool) -> None:
    runnable = create_case(gated=gated).runnable(dtype)
    order = np.random.default_rng(1).permutation(NUM_ROWS).tolist()
    whole = run(runnable, SLOTS)
    with library.use_threads(1):
        assert np.array_equal(run(runnable, [SLOTS[row] for row in order], order), whole[order])
        for row in (0, 3, 5, 7, 39):
            assert np.array_equal(run(runnable, SLOTS[row : row + 1], [row])[0], whole[row])


def test_a_fused_gate_changes_no_bit(isa: str) -> None:
    case = create_case(gated=True)
    fused, apart = case.runnable("bfloat16"), case.runnable("bfloat16", fused=False)
    assert len(fused.program.instructions) < len(apart.program.instructions)
    assert np.array_equal(run(fused, SLOTS), run(apart, SLOTS))


def test_invalid_slots_and_matrices_are_refused() -> None:
    runnable = create_case().runnable("float32")
    given = parameters(runnable, step_of_rows(NUM_ROWS), [])
    result = given.pop("result")
    linear = runnable.program.instructions[3]
    weights = {
        role: f"weight{linear[4 + at]}" for at, role in enumerate(("weight", "bias", "a", "b", "ranks", "parts"))
    }
    for changes, message in (
        ({"adapter_slots": integers([3] * NUM_ROWS)}, "adapter_slots[0] = 3 is outside the 3 slots of adapters"),
        ({"adapter_slots": integers([-1])}, "adapter_slots must be int32, one for each of 40 rows"),
        (
            {weights["ranks"]: typed(np.full((3, 3), 49), "float32")},
            "instruction 2 (linear): ranks must be from 0 to 48",
        ),
        ({weights["parts"]: typed(np.full(8, np.nan), "float32")}, "instruction 2 (linear): parts must be from 0 to 2"),
        ({weights["b"]: typed(np.zeros((3, 7, 48, 16)), "float32")}, "instruction 2 (linear): a must be [3, parts * R"),
    ):
        changed = given | {"adapter_slots": integers(SLOTS)} | changes | {"result": result}
        assert status_of_program(changed) != 0
        assert library.last_error().removeprefix("program: ").startswith(message)
