"""Every fault of the master that could garble a text is detected as an error."""

import pytest
from llm_serving.core.step import NO_BLOCK, BlockMoveKind
from llm_serving.core.window import CacheGroups, Window
from llm_serving.errors import WorkerError
from llm_serving.worker.block_guard import BlockGuard, BlockTags
from support.step_factories import block_moves, step_input

COPY, SWAP_OUT, SWAP_IN, EXPORT, IMPORT, *_ = map(int, BlockMoveKind)
INSIDE = (BlockMoveKind.COPY, BlockMoveKind.SWAP_OUT, BlockMoveKind.SWAP_IN)


@pytest.fixture
def guard():
    """Return a guard with block 1 full and two tokens in block 2, both of epoch 7."""
    guard = BlockGuard(num_blocks=8, num_swap_blocks=2, block_size=4)
    guard.check(a_row(6, 0, [1, 2], [7, 7]))
    return guard


def a_row(count, num_computed, blocks, epochs):
    return step_input([([5] * count, num_computed, blocks)], epochs=[epochs])


def test_block_guard_allows_a_row_to_read_and_extend_its_blocks(guard):
    guard.check(a_row(1, 6, [1, 2], [7, 7]))
    guard.check(a_row(3, 7, [1, 2, 3], [7, 7, 9]))
    guard.check(a_row(1, 10, [1, 2, 3], [7, 7, 9]))


def test_block_guard_allows_several_rows_to_read_a_shared_block(guard):
    step = step_input([([5], 4, [1, 3]), ([5], 4, [1, 4])], epochs=[[7, 8], [7, 9]])
    guard.check(step)


def test_reading_a_reassigned_block_is_an_error(guard):
    guard.check(a_row(4, 0, [1], [8]))
    with pytest.raises(WorkerError, match="row 0 would read block 1, which another owner has written"):
        guard.check(a_row(1, 6, [1, 2], [7, 7]))


def test_reading_a_block_of_an_earlier_owner_is_an_error(guard):
    with pytest.raises(WorkerError, match="block 1, which another owner"):
        guard.check(a_row(1, 4, [1, 3], [6, 9]))


def test_skipping_a_position_is_an_error(guard):
    with pytest.raises(WorkerError, match="row 0 would read more of block 2 than was written"):
        guard.check(a_row(1, 7, [1, 2], [7, 7]))


def test_reading_an_unwritten_block_is_an_error(guard):
    with pytest.raises(WorkerError, match="more of block 5 than was written"):
        guard.check(a_row(1, 4, [5, 6], [1, 1]))


def test_reading_beyond_a_rewritten_block_is_an_error(guard):
    guard.check(a_row(2, 0, [1], [7]))
    with pytest.raises(WorkerError, match="more of block 1 than was written"):
        guard.check(a_row(1, 6, [1, 2], [7, 7]))


def test_two_rows_writing_one_block_is_an_error(guard):
    with pytest.raises(WorkerError, match="two rows would write one block"):
        guard.check(step_input([([5], 0, [3]), ([5], 0, [3])], epochs=[[8], [9]]))


def test_writing_a_block_that_another_row_reads_is_an_error(guard):
    with pytest.raises(WorkerError, match="row 0 would read block 1, which another owner"):
        guard.check(step_input([([5], 6, [1, 2]), ([5], 0, [1])], epochs=[[7, 7], [9, 0]]))


def test_unused_columns_of_a_block_table_are_not_checked(guard):
    step = step_input([([5], 6, [1, 2]), ([5] * 9, 0, [3, 4, 5])], epochs=[[7, 7, 0], [8, 8, 8]])
    guard.check(step)


def test_a_copied_block_gets_the_epoch_and_tokens_of_its_move(guard):
    guard.move(block_moves((COPY, 2, 4, 7, 30, 1)))
    guard.check(a_row(1, 5, [1, 4], [7, 30]))
    with pytest.raises(WorkerError, match="block 4, which another owner"):
        guard.check(a_row(1, 6, [1, 4], [7, 7]))


def test_reading_beyond_a_copied_block_is_an_error(guard):
    guard.move(block_moves((COPY, 2, 4, 7, 30, 1)))
    with pytest.raises(WorkerError, match="more of block 4 than was written"):
        guard.check(a_row(1, 6, [1, 4], [7, 30]))


@pytest.mark.parametrize("kind", INSIDE)
def test_moving_a_reassigned_block_is_an_error(guard, kind):
    guard.move(block_moves((SWAP_OUT, 1, 1, 7, 7, 4)))
    with pytest.raises(WorkerError, match=f"{kind.name} would read block 1, which another owner has written"):
        guard.move(block_moves((kind, 1, 0, 6, 30, 4)))


@pytest.mark.parametrize("kind", INSIDE)
def test_moving_more_tokens_than_written_is_an_error(guard, kind):
    guard.move(block_moves((SWAP_OUT, 2, 1, 7, 7, 2), (COPY, 2, 1, 7, 7, 2)))
    with pytest.raises(WorkerError, match=f"{kind.name} would read more of block 1 than was written"):
        guard.move(block_moves((kind, 1, 0, 7, 30, 3)))


def test_moves_are_checked_in_order(guard):
    guard.move(block_moves((COPY, 2, 4, 7, 30, 2), (SWAP_OUT, 4, 0, 30, 9, 2), (COPY, 1, 4, 7, 31, 4)))
    guard.check(a_row(1, 4, [4, 5], [31, 32]))
    with pytest.raises(WorkerError, match="COPY would read block 4, which another owner"):
        guard.move(block_moves((COPY, 4, 5, 30, 33, 2)))


def test_a_swapped_out_block_can_be_swapped_in(guard):
    guard.move(block_moves((SWAP_OUT, 1, 0, 7, 3, 4), (SWAP_OUT, 2, 1, 7, 4, 2)))
    guard.check(a_row(8, 0, [1, 2], [8, 8]))
    guard.move(block_moves((SWAP_IN, 0, 5, 3, 20, 4), (SWAP_IN, 1, 6, 4, 21, 2)))
    guard.check(a_row(1, 6, [5, 6], [20, 21]))


def test_swapping_in_a_reused_host_block_is_an_error(guard):
    guard.move(block_moves((SWAP_OUT, 1, 0, 7, 3, 4), (SWAP_OUT, 1, 0, 7, 4, 4)))
    with pytest.raises(WorkerError, match="SWAP_IN would read block 0, which another owner"):
        guard.move(block_moves((SWAP_IN, 0, 5, 3, 20, 4)))


class TestTransferPool:
    """Two WorkAgents with caches of their own and a shared transfer pool of 3 blocks."""

    @pytest.fixture
    def pool(self):
        return BlockTags.of_empty(3)

    @pytest.fixture
    def first(self, pool):
        """Return a guard with block 1 full and two tokens in block 2, both of epoch 7."""
        guard = BlockGuard(8, 0, 4, transfer=pool)
        guard.check(a_row(6, 0, [1, 2], [7, 7]))
        return guard

    @pytest.fixture
    def second(self, pool):
        return BlockGuard(8, 0, 4, transfer=pool)

    def test_an_exported_block_can_be_imported(self, first, second):
        exports = block_moves((EXPORT, 1, 0, 7, 50, 4), (EXPORT, 2, 2, 7, 51, 2))
        first.start_exports(exports)
        first.finish_exports(exports)
        imports = block_moves((IMPORT, 0, 5, 50, 9, 4), (IMPORT, 2, 6, 51, 9, 2))
        second.move(imports)
        second.check_imports(imports)
        second.check(a_row(1, 6, [5, 6], [9, 9]))

    def test_an_unfinished_export_cannot_be_imported(self, first, second):
        exports = block_moves((EXPORT, 1, 0, 7, 50, 4))
        first.start_exports(exports)
        first.finish_exports(exports)
        first.start_exports(block_moves((EXPORT, 1, 0, 7, 60, 4)))
        for epoch in (50, 60):
            with pytest.raises(WorkerError, match="IMPORT would read more of block 0 than was written"):
                second.move(block_moves((IMPORT, 0, 5, epoch, 9, 4)))

    def test_importing_an_outdated_epoch_is_an_error(self, first, second):
        for epoch in (50, 60):
            exports = block_moves((EXPORT, 1, 0, 7, epoch, 4))
            first.start_exports(exports)
            first.finish_exports(exports)
        with pytest.raises(WorkerError, match="IMPORT would read block 0, which another owner has written"):
            second.move(block_moves((IMPORT, 0, 5, 50, 9, 4)))

    def test_a_block_overwritten_during_its_import_is_an_error(self, first, second):
        exports = block_moves((EXPORT, 1, 0, 7, 50, 4))
        first.start_exports(exports)
        first.finish_exports(exports)
        imports = block_moves((IMPORT, 0, 5, 50, 9, 4))
        second.move(imports)
        first.start_exports(block_moves((EXPORT, 1, 0, 7, 60, 4)))
        with pytest.raises(WorkerError, match="IMPORT would read more of block 0 than was written"):
            second.check_imports(imports)

    def test_exporting_a_block_of_another_owner_is_an_error(self, first):
        with pytest.raises(WorkerError, match="EXPORT would read block 1, which another owner has written"):
            first.start_exports(block_moves((EXPORT, 1, 0, 8, 50, 4)))


class TestWindow:
    """Blocks of 4 tokens and a window of 6: the token at position 9 attends to positions from 4 on, that at 12 from 7
    on.
    """

    @pytest.fixture
    def guard(self):
        guard = BlockGuard(num_blocks=8, num_swap_blocks=0, block_size=4, groups=CacheGroups((Window(6),)))
        guard.check(a_row(12, 0, [1, 2, 3], [7, 7, 7]))
        return guard

    def test_blocks_behind_the_window_are_not_checked(self, guard):
        guard.check(a_row(4, 0, [1], [8]))
        guard.check(a_row(1, 12, [NO_BLOCK, 2, 3, 4], [0, 7, 7, 7]))
        guard.check(a_row(1, 12, [1, 2, 3, 4], [7, 7, 7, 7]))

    def test_blocks_inside_the_window_are_checked(self, guard):
        guard.check(a_row(4, 0, [2], [8]))
        with pytest.raises(WorkerError, match="row 0 would read block 2, which another owner has written"):
            guard.check(a_row(1, 12, [NO_BLOCK, 2, 3, 4], [0, 7, 7, 7]))
