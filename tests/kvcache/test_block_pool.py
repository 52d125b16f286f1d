import pytest
from llm_serving.kvcache import BlockPool


def test_allocate_gives_lowest_blocks_first() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert (pool.num_free_blocks, pool.num_used_blocks) == (1, 3)


def test_freed_blocks_are_reused_in_the_order_they_came_back() -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    pool.free([2, 0])
    pool.free([3])
    assert pool.allocate(3) == [2, 0, 3]


def test_freeing_twice_is_caught() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.free([0])
    with pytest.raises(AssertionError, match="block 0 freed twice"):
        pool.free([0])


def test_allocating_more_than_is_free_is_caught() -> None:
    with pytest.raises(AssertionError, match="asked for 3 blocks, 2 are free"):
        BlockPool(2).allocate(3)


def test_check_integrity_sees_a_block_nobody_holds() -> None:
    pool = BlockPool(3)
    block_ids = pool.allocate(2)
    pool.check_integrity(block_ids)
    with pytest.raises(AssertionError, match="differ from the block tables"):
        pool.check_integrity(block_ids[:1])
