"""Operations with states equal their NumPy reference for any division into steps, slots and batch."""

import functools

import numpy as np
import pytest
from llm_serving.kernels import library
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value
from llm_serving.network.states import causal_conv, delta_rule, ssm
from support.decoder_calls import Step
from support.kernel_calls import FLOAT_TYPES, ROUNDING_UNIT, Array, Typed, assert_close, typed
from support.kernels import reference
from support.program_calls import Runnable, States, changed, parameters, status_of_program
from support.state_calls import (
    Part,
    StateOperation,
    copied,
    drawn,
    random_rows,
    random_states,
    run_parts,
    sequences_of,
)


def convolution(width: int, taps: int, *, bias: bool, silu: bool) -> StateOperation:
    weight, beta = drawn((width, 1, taps), 5), drawn((width,), 6) if bias else None

    def twin(x: Array, states: Array, sequences: reference.Sequences) -> Array:
        return reference.causal_conv(x, _single(weight)[:, 0].T, beta, states, sequences, silu=silu)

    return StateOperation(
        width,
        width,
        lambda net, x: causal_conv(net, x, "conv", taps, bias=bias, function="silu" if silu else ""),
        {"conv.weight": weight[:, 0]} | ({"conv.bias": beta} if bias else {}),
        twin,
    )


def _single(values: Array) -> Array:
    return values.astype(np.float32).astype(np.float64)


def recurrence(delta: bool, heads: int, key_heads: int, key_dim: int, value_dim: int) -> StateOperation:
    """Return the operation: the gated delta rule if `delta`, else Mamba-2."""
    values = heads * value_dim
    widths = [key_heads * key_dim] * 2 + [values, heads] + [heads] * delta
    arrays = {"rates": drawn((heads,), 5), "bias": drawn((heads,), 6), "skip": drawn((heads,), 7)}
    rates, bias, skip = (_single(each) for each in arrays.values())
    names = {"rates": "rates", "bias": "bias"}

    def body(net: Network, x: Value) -> Value:
        q, k, v, a, *b = net.split(x, *widths)
        if delta:
            return delta_rule(net, q, k, v, a, b[0], key_heads=key_heads, scale=key_dim**-0.5, **names)
        return ssm(net, v, a, k, q, groups=key_heads, skip="skip", limits=(0.01, 3.0), **names)

    def twin(x: Array, states: Array, sequences: reference.Sequences) -> Array:
        q, k, v, a, *b = np.split(x, np.cumsum(widths)[:-1], axis=1)
        matrices = reference.matrices_of_states(states, value_dim)
        shared = -np.exp(rates), bias
        if delta:
            given = q, k, v, a, b[0], *shared, matrices, sequences
            y = reference.delta_rule(*given, key_heads=key_heads, scale=key_dim**-0.5, eps=1e-6)
        else:
            y = reference.ssm(v, a, k, q, *shared, skip, matrices, sequences, groups=key_heads, low=0.01, high=3.0)
        states[...] = reference.states_of_matrices(matrices)
        return y

    if delta:
        del arrays["skip"]
    return StateOperation(sum(widths), values, body, arrays, twin)


OPERATIONS = {
    "conv": convolution(48, 3, bias=False, silu=False),
    "conv of any width": convolution(45, 4, bias=True, silu=True),
    "wide conv": convolution(560, 2, bias=True, silu=False),
    "delta rule": recurrence(True, heads=4, key_heads=2, key_dim=32, value_dim=32),
    "delta rule of odd sizes": recurrence(True, heads=3, key_heads=1, key_dim=7, value_dim=20),
    "ssm": recurrence(False, heads=4, key_heads=2, key_dim=32, value_dim=16),
    "ssm of odd sizes": recurrence(False, heads=3, key_heads=3, key_dim=9, value_dim=21),
}
NUM_SLOTS = 8


@functools.cache
def runnable_of(name: str, dtype: str) -> tuple[Runnable, Typed]:
    operation = OPERATIONS[name]
    x = random_rows(operation, 100, dtype)
    return operation.runnable(x), x


MIXED = [
    Part(range(5, 45), slot=-1, stores={0: 0, 9: 1, 39: 2}),
    Part([3], slot=4, stores={0: 4}),
    Part(range(50, 57), slot=3, stores={2: 3, 6: 5}),
    Part([], slot=-1),
    Part([7, 8], slot=6),
]
"""A prompt; a decode row in place; a chunk that stores early to its own slot; an empty part; rows without a store."""


def bound_of(expected: Array, dtype: str) -> Array:
    """Return the error bound: that of the sums, and of one rounding to the type."""
    return np.abs(expected) * (1e-5 + ROUNDING_UNIT[dtype]) + 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_state_operations_equal_the_numpy_reference(isa: str, name: str, dtype: str) -> None:
    operation = OPERATIONS[name]
    runnable, x = runnable_of(name, dtype)
    states = random_states(runnable, operation, NUM_SLOTS, dtype)
    before = states.arrays[0].array.copy()
    expected_states = before.astype(np.float64)
    rows = np.concatenate([x.values[list(part.rows)] for part in MIXED]).astype(np.float64)
    expected = operation.reference(rows, expected_states, sequences_of(MIXED))
    y = run_parts(runnable, MIXED, states)
    assert_close(Typed(np.concatenate([each.array for each in y]), "float32"), expected, bound_of(expected, dtype))
    assert_close(states.arrays[0], expected_states, bound_of(expected_states, "float32"))
    assert np.array_equal(states.arrays[0].array[[6, 7]], before[[6, 7]])


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_state_operations_are_independent_of_the_division_into_steps(isa: str, name: str, dtype: str) -> None:
    """Three sequences advance in random chunks, in any slots, beside each other, with one thread or two."""
    runnable, _ = runnable_of(name, dtype)
    sequences = [list(range(40)), list(range(40, 73)), list(range(73, 100))]
    states = States.of(runnable, NUM_SLOTS)
    whole = [
        run_parts(runnable, [Part(rows, stores={len(rows) - 1: slot})], states)[0].bits
        for slot, rows in enumerate(sequences)
    ]
    after = [states.arrays[0].bits[slot].copy() for slot in range(3)]
    for seed in range(6):
        rng = np.random.default_rng(seed)
        states, slots, done = States.of(runnable, NUM_SLOTS), [-1, -1, -1], [0, 0, 0]
        found: list[list[Array]] = [[], [], []]
        with library.use_threads(1 + seed % 2):
            while any(done[at] < len(rows) for at, rows in enumerate(sequences)):
                live = [at for at, rows in enumerate(sequences) if done[at] < len(rows)]
                chosen = rng.permutation(live)[: rng.integers(1, len(live) + 1)].tolist()
                free = [slot for slot in rng.permutation(NUM_SLOTS).tolist() if slot not in slots]
                parts = []
                for at in chosen:
                    count = min(int(rng.integers(1, 14)), len(sequences[at]) - done[at])
                    target = slots[at] if slots[at] >= 0 and rng.random() < 0.5 else free.pop()
                    parts.append(Part(sequences[at][done[at] : done[at] + count], slots[at], {count - 1: target}))
                    if rng.random() < 0.5:
                        parts[-1].stores.setdefault(int(rng.integers(count)), free.pop())
                for at, part, y in zip(chosen, parts, run_parts(runnable, parts, states), strict=True):
                    found[at].append(y.bits)
                    slots[at], done[at] = part.stores[len(part.rows) - 1], done[at] + len(part.rows)
        for at in range(3):
            assert np.array_equal(np.concatenate(found[at]), whole[at]), (seed, at)
            assert np.array_equal(states.arrays[0].bits[slots[at]], after[at]), (seed, at)


@pytest.mark.parametrize("name", OPERATIONS)
def test_state_of_rejected_drafts_is_restored_from_the_slot_of_any_row(isa: str, name: str) -> None:
    """Each row stores to a slot of its own; the sequence continues from any of them, and none of them changes."""
    runnable, _ = runnable_of(name, "bfloat16")
    states = States.of(runnable, NUM_SLOTS)
    drafted = run_parts(runnable, [Part(range(5), stores={row: row for row in range(5)})], states)[0].bits
    before = copied(states)
    for row in range(4):
        again = run_parts(runnable, [Part(range(row + 1, 5), slot=row, stores={3 - row: 7})], states)[0].bits
        assert np.array_equal(again, drafted[row + 1 :])
        assert np.array_equal(states.arrays[0].bits[7], before.arrays[0].bits[4])
    assert np.array_equal(states.arrays[0].bits[:7], before.arrays[0].bits[:7])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([Part([0], slot=NUM_SLOTS)], f"state_in[0] = 8 is outside the {NUM_SLOTS} slots of the states"),
        ([Part([0], slot=-2)], f"state_in[0] = -2 is outside the {NUM_SLOTS} slots of the states"),
        ([Part([0, 1], stores={1: 8})], f"state_out[1] = 8 is outside the {NUM_SLOTS} slots of the states"),
        ([Part([0], stores={0: -2})], f"state_out[0] = -2 is outside the {NUM_SLOTS} slots of the states"),
        ([Part([0], stores={0: 3}), Part([1], stores={0: 3})], "state_out[1] = 3: request 0 stores to this slot too"),
        ([Part([0], slot=3), Part([1], stores={0: 3})], "state_in[0] = 3: request 1 stores to this slot"),
    ],
)
def test_state_operations_refuse_slots_that_would_corrupt_a_state(parts: list[Part], message: str) -> None:
    runnable, _ = runnable_of("conv", "bfloat16")
    states = States.of(runnable, NUM_SLOTS)
    before = copied(states)
    with pytest.raises(AssertionError, match="program: "):
        run_parts(runnable, parts, states)
    assert library.last_error() == f"program: {message}"
    assert np.array_equal(states.arrays[0].bits, before.arrays[0].bits)


def test_state_operations_may_read_the_same_slot() -> None:
    runnable, _ = runnable_of("conv", "bfloat16")
    states = random_states(runnable, OPERATIONS["conv"], NUM_SLOTS, "bfloat16")
    one, other = run_parts(runnable, [Part([1], slot=2, stores={0: 0}), Part([1], slot=2, stores={0: 1})], states)
    assert np.array_equal(one.bits, other.bits)


@pytest.mark.parametrize(
    ("name", "word", "value", "message"),
    [
        ("conv", 1, -1, "(causal_conv): y is absent"),
        ("conv", 3, -1, "(causal_conv): taps are absent"),
        ("conv", 5, 2, "(causal_conv): function must be 0 or 1, is 2"),
        ("conv", 6, 1, "(causal_conv): there is no state 1"),
        ("delta rule", 2, -1, "(delta_rule): q is absent"),
        ("delta rule", 6, -1, "(delta_rule): b is absent"),
        ("delta rule", 7, -1, "(delta_rule): rates and bias go together"),
        ("delta rule", 11, 3, "(delta_rule): 3 heads do not divide 4 heads of values and 64 columns, or those 128 "),
        ("delta rule", 12, -1, "(delta_rule): there is no state -1"),
        ("ssm", 5, -1, "(ssm): dt is absent"),
    ],
)
def test_state_operations_refuse_invalid_instructions(name: str, word: int, value: int, message: str) -> None:
    runnable, _ = runnable_of(name, "bfloat16")
    instructions = runnable.program.instructions.copy()
    instructions[2, word] = value
    with pytest.raises(AssertionError, match="program: "):
        run_parts(changed(runnable, instructions=instructions), [Part([0, 1])], States.of(runnable, NUM_SLOTS))
    assert library.last_error().startswith(f"program: instruction 1 {message}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state0": typed(np.zeros((8, 90)), "bfloat16")}, "state 0 must be float32 [slots, ..], with as many slots"),
        ({"state0": typed(np.zeros((8, 95)), "float32")}, "instruction 1 (causal_conv): state 0 must have 2 times 48 "),
        ({"state_in": typed([0], "float32")}, "state_in must be int32 or int64, one for each of 1 requests"),
        ({"state_out": typed([0], "float32")}, "state_out must be int32 or int64, one for each of 2 rows"),
    ],
)
def test_state_operations_refuse_states_of_another_shape(changes: dict[str, Typed], message: str) -> None:
    runnable, _ = runnable_of("conv", "bfloat16")
    part = Part([0, 1])
    states = States.of(runnable, NUM_SLOTS).at([-1], [-1, -1])
    step = Step(list(part.rows), [0, 0], [-1, -1], [[0]], [2], [2], [0, 1])
    assert status_of_program(parameters(runnable, step, [], states) | changes) != 0
    assert library.last_error().startswith(f"program: {message}")
