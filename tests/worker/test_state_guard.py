"""A row reads only the state after its own computed tokens, and no row disturbs another one."""

from __future__ import annotations

import numpy as np
import pytest
from llm_serving.core.step import STATE_BEFORE, StateAccess, StepInput
from llm_serving.errors import WorkerError
from llm_serving.worker.block_guard import StateGuard
from msgspec.structs import replace
from support.step_factories import step_input


def step_of(rows: list[tuple[int, int]], *accesses: tuple[int, ...]) -> StepInput:
    """Return a step of rows (tokens computed before, tokens), with accesses (row, token, slot, epoch)."""
    step = step_input([([1] * count, before, [0]) for before, count in rows])
    return replace(step, states=np.array(accesses, np.int32).reshape(-1, len(StateAccess._fields)))


def test_state_inputs_have_a_slot_for_each_row_and_token() -> None:
    guard = StateGuard(4)
    state_in, state_out = guard.check(step_of([(0, 3), (0, 2)], (0, 1, 3, 7), (0, 2, 0, 8), (1, 1, 2, 9)))
    assert state_in.tolist() == [-1, -1]
    assert state_out.tolist() == [-1, 3, 0, -1, 2]
    state_in, state_out = guard.check(
        step_of([(3, 1), (2, 2)], (0, STATE_BEFORE, 0, 8), (0, 0, 0, 8), (1, STATE_BEFORE, 3, 7), (1, 1, 1, 1))
    )
    assert (state_in.tolist(), state_out.tolist()) == ([0, 3], [0, -1, 1])
    assert (state_in.dtype, state_out.dtype) == (np.int32, np.int32)


BEFORE = step_of([(0, 4), (0, 2)], (0, 3, 0, 5), (1, 1, 1, 6))


@pytest.mark.parametrize(
    ("rows", "accesses", "message"),
    [
        ([(4, 1)], [(0, STATE_BEFORE, 0, 4), (0, 0, 0, 4)], "row 0 would read slot 0, which another owner has written"),
        ([(3, 1)], [(0, STATE_BEFORE, 0, 5)], "row 0 would read slot 0, whose state covers 4 tokens"),
        ([(4, 1)], [(0, 0, 0, 5)], "a row must read a state if, and only if, it has computed tokens"),
        ([(0, 1)], [(0, STATE_BEFORE, 0, 5)], "a row must read a state if, and only if, it has computed tokens"),
        ([(0, 1), (0, 1)], [(0, 0, 2, 7), (1, 0, 2, 8)], "two tokens would store their states in one slot"),
        (
            [(0, 1)],
            [(0, 0, 2, 7), (0, 0, 3, 8)],
            "a row would read two slots, or store the state after one token in two slots",
        ),
        (
            [(4, 1)],
            [(0, STATE_BEFORE, 0, 5), (0, STATE_BEFORE, 0, 5)],
            "a row would read two slots, or store the state",
        ),
        ([(4, 1), (0, 1)], [(0, STATE_BEFORE, 0, 5), (1, 0, 0, 9)], "row 1 would overwrite slot 0, which another row"),
        ([(0, 1)], [(0, 0, 4, 1)], "states must be of rows below 1 and slots below 4"),
        ([(0, 1)], [(0, 0, -1, 1)], "states must be of rows below 1 and slots below 4"),
        ([(0, 1)], [(1, 0, 0, 1)], "states must be of rows below 1 and slots below 4"),
        ([(0, 1)], [(0, 1, 0, 1)], "a row may store states only after tokens that it computes"),
        ([(0, 1)], [(0, -2, 0, 1)], "a row may store states only after tokens that it computes"),
    ],
)
def test_state_guard_refuses_a_wrong_access(
    rows: list[tuple[int, int]], accesses: list[tuple[int, ...]], message: str
) -> None:
    guard = StateGuard(4)
    guard.check(BEFORE)
    with pytest.raises(WorkerError, match=message):
        guard.check(step_of(rows, *accesses))


def test_state_guard_allows_rows_to_read_the_same_checkpoint() -> None:
    guard = StateGuard(4)
    guard.check(BEFORE)
    accesses = [(0, STATE_BEFORE, 0, 5), (0, 0, 2, 7), (1, STATE_BEFORE, 0, 5), (1, 0, 3, 8)]
    assert guard.check(step_of([(4, 1), (4, 1)], *accesses))[0].tolist() == [0, 0]


def test_state_guard_refuses_accesses_of_another_shape() -> None:
    with pytest.raises(WorkerError, match=r"the array `states` must have the shape \[N, 4\]. Given: \[1, 3\]"):
        StateGuard(4).check(replace(step_of([(0, 1)]), states=np.zeros((1, 3), np.int32)))
