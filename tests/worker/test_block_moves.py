import numpy as np
import pytest
from llm_serving.core.step import BlockMoveKind
from llm_serving.errors import WorkerError
from llm_serving.worker.kv_cache import check_block_moves, runs
from support.step_factories import block_moves

COPY, OUT, IN, TAKE = BlockMoveKind.COPY, BlockMoveKind.SWAP_OUT, BlockMoveKind.SWAP_IN, BlockMoveKind.IMPORT


def test_the_last_blocks_of_cache_and_host_pool_may_move():
    check_block_moves(block_moves((COPY, 9, 0), (OUT, 9, 2), (IN, 2, 9)), num_blocks=10, num_swap_blocks=3)


def test_no_moves_need_no_host_pool():
    check_block_moves(block_moves(), num_blocks=1, num_swap_blocks=0)


@pytest.mark.parametrize(
    ("move", "message"),
    [
        ((COPY, 10, 0), r"COPY from a block of the cache must name one below `num_blocks` 10\. Given: 10"),
        ((COPY, 0, -1), r"COPY to a block of the cache must name one below `num_blocks` 10\. Given: -1"),
        ((OUT, 10, 0), r"SWAP_OUT from a block of the cache must name one below `num_blocks` 10\. Given: 10"),
        ((OUT, 9, 3), r"SWAP_OUT to a block of the host pool must name one below `num_swap_blocks` 3\. Given: 3"),
        ((IN, 3, 9), r"SWAP_IN from a block of the host pool must name one below `num_swap_blocks` 3\. Given: 3"),
        ((IN, -1, 9), r"SWAP_IN from a block of the host pool must name one below `num_swap_blocks` 3\. Given: -1"),
        ((IN, 0, 10), r"SWAP_IN to a block of the cache must name one below `num_blocks` 10\. Given: 10"),
        (
            (TAKE, 4, 9),
            r"IMPORT from a block of the transfer pool must name one below `num_transfer_blocks` 4\. Given: 4",
        ),
        ((3, 0, 0), r"of the kinds 0 COPY, 1 SWAP_OUT, 2 SWAP_IN, 4 IMPORT\. Given: 3"),
        ((-1, 0, 0), r"of the kinds 0 COPY, 1 SWAP_OUT, 2 SWAP_IN, 4 IMPORT\. Given: -1"),
    ],
)
def test_a_wrong_move_is_named_wherever_it_stands(move, message):
    good = (COPY, 1, 2)
    for moves in ([move], [good, move], [move, good]):
        with pytest.raises(WorkerError, match=message):
            check_block_moves(block_moves(*moves), num_blocks=10, num_swap_blocks=3, num_transfer_blocks=4)


def test_what_is_handed_over_stays_inside_the_pool():
    check_block_moves(block_moves((BlockMoveKind.EXPORT, 9, 3)), 10, 3, 4, exports=True)
    with pytest.raises(WorkerError, match="EXPORT to a block of the transfer pool"):
        check_block_moves(block_moves((BlockMoveKind.EXPORT, 9, 4)), 10, 3, 4, exports=True)
    with pytest.raises(WorkerError, match=r"of the kinds 3 EXPORT\. Given: 0"):
        check_block_moves(block_moves((COPY, 9, 3)), 10, 3, 4, exports=True)


@pytest.mark.parametrize("shape", [(6,), (1, 3), (1, 1, 6)])
def test_another_shape_is_refused(shape):
    with pytest.raises(WorkerError, match=r"block_moves must be \[N, 6\]\. Given: "):
        check_block_moves(np.zeros(shape, np.int32), num_blocks=10, num_swap_blocks=3)


def test_runs_are_neighbours_of_one_kind():
    moves = block_moves((OUT, 5, 0), (OUT, 6, 1), (COPY, 5, 6), (OUT, 6, 2), (IN, 0, 7), (IN, 1, 8))
    assert [(kind, pairs.tolist()) for kind, pairs in runs(moves)] == [
        (OUT, [[5, 0], [6, 1]]),
        (COPY, [[5, 6]]),
        (OUT, [[6, 2]]),
        (IN, [[0, 7], [1, 8]]),
    ]


def test_no_moves_are_no_runs():
    assert list(runs(block_moves())) == []
