import pytest
from llm_serving.kvcache import BlockPool


def test_block_pool_allocates_lowest_blocks_first() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert (pool.num_free_blocks, pool.num_used_blocks) == (1, 3)


def test_block_pool_reuses_the_latest_freed_block_first() -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    pool.free([2, 0])
    pool.free([3])
    assert pool.allocate(3) == [3, 0, 2]


def test_touched_blocks_are_those_that_were_ever_allocated() -> None:
    pool = BlockPool(4)
    assert pool.num_touched_blocks == 0
    pool.free(pool.allocate(2))
    pool.free(pool.allocate(1))
    assert pool.num_touched_blocks == 2


def test_cached_block_is_found_while_allocated_and_after_its_release() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1)
    pool.register_hash(block_id, pool.epoch(block_id), b"x")
    assert pool.find_cached(b"x") == block_id
    pool.free([block_id])
    assert pool.find_cached(b"x") == block_id
    pool.add_references([block_id])
    assert (pool.ref_count(block_id), pool.num_free_blocks) == (1, 1)
    pool.check_integrity([block_id])


def test_uncached_blocks_are_reused_first_then_the_least_recently_used() -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    for block_id in (0, 1, 2):
        pool.register_hash(block_id, pool.epoch(block_id), bytes([block_id]))
    for block_id in (1, 0, 3, 2):
        pool.free([block_id])
    assert pool.allocate(4) == [3, 1, 0, 2]
    assert [pool.find_cached(bytes([block_id])) for block_id in (0, 1, 2)] == [None, None, None]
    pool.check_integrity(range(4))


def test_first_of_two_blocks_with_the_same_hash_stays_cached() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register_hash(first, pool.epoch(first), b"x")
    pool.register_hash(second, pool.epoch(second), b"x")
    assert pool.find_cached(b"x") == first
    pool.check_integrity([first, second])


def test_cleared_hashes_are_not_found() -> None:
    pool = BlockPool(1)
    (block_id,) = pool.allocate(1)
    pool.register_hash(block_id, pool.epoch(block_id), b"x")
    pool.clear_hashes()
    assert pool.find_cached(b"x") is None
    pool.check_integrity([0])


def test_block_pool_refuses_a_double_free() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    pool.free([0])
    with pytest.raises(AssertionError, match="block 0 freed twice"):
        pool.free([0])


def test_block_pool_refuses_an_allocation_beyond_its_free_blocks() -> None:
    with pytest.raises(AssertionError, match="cannot allocate 3 blocks: 2 are free"):
        BlockPool(2).allocate(3)


def test_check_integrity_detects_a_leaked_block() -> None:
    pool = BlockPool(3)
    block_ids = pool.allocate(2)
    pool.check_integrity(block_ids)
    with pytest.raises(AssertionError, match="differ from the block tables"):
        pool.check_integrity(block_ids[:1])
