"""Every way in which a fault of the master could garble a text is an error instead."""

import pytest
from llm_serving.core.step import BlockMove
from llm_serving.errors import WorkerError
from llm_serving.worker.block_guard import BlockGuard
from step_factories import block_moves, step_input

COPY, SWAP_OUT, SWAP_IN = map(int, BlockMove)


@pytest.fixture
def guard():
    """Block 1 is full and block 2 has two tokens, both of epoch 7."""
    guard = BlockGuard(num_blocks=8, num_swap_blocks=2, block_size=4)
    guard.check(a_row(6, 0, [1, 2], [7, 7]))
    return guard


def a_row(count, num_computed, blocks, epochs):
    return step_input([([5] * count, num_computed, blocks)], epochs=[epochs])


def test_what_was_written_may_be_read_and_gone_on_with(guard):
    guard.check(a_row(1, 6, [1, 2], [7, 7]))
    guard.check(a_row(3, 7, [1, 2, 3], [7, 7, 9]))
    guard.check(a_row(1, 10, [1, 2, 3], [7, 7, 9]))


def test_a_shared_block_may_be_read_by_many(guard):
    step = step_input([([5], 4, [1, 3]), ([5], 4, [1, 4])], epochs=[[7, 8], [7, 9]])
    guard.check(step)


def test_a_block_that_was_given_away(guard):
    guard.check(a_row(4, 0, [1], [8]))
    with pytest.raises(WorkerError, match="row 0 would read block 1, which somebody else has written"):
        guard.check(a_row(1, 6, [1, 2], [7, 7]))


def test_a_block_of_an_earlier_owner(guard):
    with pytest.raises(WorkerError, match="block 1, which somebody else"):
        guard.check(a_row(1, 4, [1, 3], [6, 9]))


def test_a_position_that_was_skipped(guard):
    with pytest.raises(WorkerError, match="row 0 would read more of block 2 than was written"):
        guard.check(a_row(1, 7, [1, 2], [7, 7]))


def test_a_block_that_was_never_written(guard):
    with pytest.raises(WorkerError, match="more of block 5 than was written"):
        guard.check(a_row(1, 4, [5, 6], [1, 1]))


def test_a_full_block_that_was_written_again(guard):
    guard.check(a_row(2, 0, [1], [7]))
    with pytest.raises(WorkerError, match="more of block 1 than was written"):
        guard.check(a_row(1, 6, [1, 2], [7, 7]))


def test_a_block_written_by_two_rows(guard):
    with pytest.raises(WorkerError, match="two rows would write one block"):
        guard.check(step_input([([5], 0, [3]), ([5], 0, [3])], epochs=[[8], [9]]))


def test_a_block_read_by_one_row_and_written_by_another(guard):
    with pytest.raises(WorkerError, match="row 0 would read block 1, which somebody else"):
        guard.check(step_input([([5], 6, [1, 2]), ([5], 0, [1])], epochs=[[7, 7], [9, 0]]))


def test_columns_past_a_row_s_need_are_nobody_s(guard):
    step = step_input([([5], 6, [1, 2]), ([5] * 9, 0, [3, 4, 5])], epochs=[[7, 7, 0], [8, 8, 8]])
    guard.check(step)


def test_a_copy_has_as_many_tokens_as_its_source_and_belongs_to_the_first_reader(guard):
    guard.move(block_moves((COPY, 2, 4)))
    guard.check(a_row(1, 6, [1, 4], [7, 30]))
    with pytest.raises(WorkerError, match="block 4, which somebody else"):
        guard.check(a_row(1, 6, [1, 4], [7, 31]))


def test_two_rows_may_not_claim_one_copy(guard):
    guard.move(block_moves((COPY, 1, 4)))
    with pytest.raises(WorkerError, match="would read block 4, which somebody else"):
        guard.check(step_input([([5], 4, [4, 5]), ([5], 4, [4, 6])], epochs=[[30, 1], [31, 2]]))


def test_what_was_swapped_out_comes_back(guard):
    guard.move(block_moves((SWAP_OUT, 1, 0), (SWAP_OUT, 2, 1)))
    guard.check(a_row(8, 0, [1, 2], [8, 8]))
    guard.move(block_moves((SWAP_IN, 0, 5), (SWAP_IN, 1, 6)))
    guard.check(a_row(1, 6, [5, 6], [20, 21]))


def test_a_swapped_block_that_comes_back_too_late(guard):
    guard.move(block_moves((SWAP_OUT, 2, 0), (SWAP_OUT, 1, 0), (SWAP_IN, 0, 5)))
    guard.check(a_row(1, 4, [5, 6], [20, 21]))
    guard.move(block_moves((SWAP_OUT, 2, 0), (SWAP_IN, 0, 4)))
    with pytest.raises(WorkerError, match="more of block 4 than was written"):
        guard.check(a_row(1, 4, [4, 6], [22, 21]))
