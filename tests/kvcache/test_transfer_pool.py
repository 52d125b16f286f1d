"""Which blocks of a prompt are imported from the disk, and which are exported for it."""

from __future__ import annotations

import pytest
from llm_serving.core.request import DiskPrefix, Request
from llm_serving.core.step import BlockMove, BlockMoveKind
from llm_serving.kvcache import BlockManager, transfer_pool
from llm_serving.kvcache.transfer_pool import DiskPrefixes, TransferPool
from support.factories import create_request

BLOCK_SIZE = 4


def manager(num_exports: int = 8) -> tuple[BlockManager, DiskPrefixes]:
    blocks = BlockManager(16, BLOCK_SIZE)
    disk = blocks.disk = DiskPrefixes(BLOCK_SIZE, TransferPool(num_exports))
    return blocks, disk


def admit(blocks: BlockManager, request: Request) -> int:
    return blocks.import_from_disk(request, blocks.admit(request, request.num_prompt_tokens))


def store(blocks: BlockManager, disk: DiskPrefixes, request: Request, num_computed: int) -> list[BlockMove]:
    if not disk.stores(request.request_id):
        return []
    stored = disk.store(request, num_computed, blocks.table(request.request_id), blocks.prompt_hashes(request))
    if stored is None:
        return []
    found, moves = stored
    disk.exports.hand_over(found.key)
    disk.exports.reclaim(found.blocks)
    assert [(move.target, move.target_epoch) for move in moves] == found.blocks
    return moves


def test_blocks_after_the_shared_ones_are_imported_and_shared_at_once() -> None:
    blocks, disk = manager()
    first, second = create_request(14), create_request(14)
    disk.add(first.request_id, DiskPrefix(3, 0, ((20, 5), (21, 6), (22, 7))))
    assert admit(blocks, first) == 12
    table = blocks.table(first.request_id)
    assert blocks.pop_block_moves() == [
        BlockMove(BlockMoveKind.IMPORT, 20 + index, table.ids[index], 5 + index, table.epochs[index], BLOCK_SIZE)
        for index in range(3)
    ]
    assert disk.pop_released() == [(20, 5), (21, 6), (22, 7)]
    disk.add(second.request_id, DiskPrefix(3, 0, ((23, 1), (24, 1), (25, 1))))
    assert admit(blocks, second) == 12
    assert blocks.pop_block_moves() == [], "the first request has imported them"
    assert blocks.block_table(second.request_id)[:3] == table.ids[:3].tolist()
    assert disk.pop_released() == [(23, 1), (24, 1), (25, 1)]
    blocks.check_integrity()


def test_blocks_are_not_imported_if_those_before_them_are_gone() -> None:
    blocks, disk = manager()
    request = create_request(14)
    disk.add(request.request_id, DiskPrefix(3, 1, ((21, 6), (22, 7))))
    assert admit(blocks, request) == 0
    assert (blocks.pop_block_moves(), disk.pop_released()) == ([], [(21, 6), (22, 7)])


def test_each_step_exports_the_full_blocks_that_the_disk_does_not_have() -> None:
    blocks, disk = manager()
    request = create_request(18)
    disk.add(request.request_id, DiskPrefix(1))
    admit(blocks, request)
    ids = blocks.block_table(request.request_id)
    assert store(blocks, disk, request, 3) == []
    assert [move.source for move in store(blocks, disk, request, 11)] == [ids[1]]
    assert [move.source for move in store(blocks, disk, request, 18)] == [ids[2], ids[3]]
    assert not disk.stores(request.request_id), "blocks of the answer are not stored"
    blocks.check_integrity()


@pytest.mark.parametrize("num_stored", [3, 0])
def test_a_prompt_without_further_blocks_is_forgotten(num_stored: int) -> None:
    blocks, disk = manager()
    request = create_request(14)
    disk.add(request.request_id, DiskPrefix(num_stored))
    admit(blocks, request)
    assert len(store(blocks, disk, request, 14)) == 3 - num_stored
    assert not disk.stores(request.request_id)


def test_a_full_pool_ends_the_storing_of_a_prompt() -> None:
    blocks, disk = manager(num_exports=2)
    request = create_request(18)
    disk.add(request.request_id, DiskPrefix(0))
    admit(blocks, request)
    assert len(store(blocks, disk, request, 12)) == 2
    assert store(blocks, disk, request, 18) == [], "a prefix with a gap would not be found"


def test_a_step_exports_a_limited_number_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_pool, "MAX_EXPORTS", 3)
    blocks, disk = manager()
    request = create_request(18)
    disk.add(request.request_id, DiskPrefix(0))
    admit(blocks, request)
    assert [len(store(blocks, disk, request, 18)) for _ in range(3)] == [3, 1, 0]


def test_a_freed_request_and_a_lost_cache_release_all_blocks() -> None:
    blocks, disk = manager()
    waiting, running = create_request(14), create_request(14)
    disk.add(waiting.request_id, DiskPrefix(1, 0, ((20, 5),)))
    blocks.free(waiting.request_id)
    assert disk.pop_released() == [(20, 5)]
    disk.add(waiting.request_id, DiskPrefix(1, 0, ((20, 6),)))
    disk.add(running.request_id, DiskPrefix(0))
    admit(blocks, running)
    assert disk.store(running, 14, blocks.table(running.request_id), blocks.prompt_hashes(running)) is not None
    blocks.reset()
    assert disk.pop_released() == [(20, 6)]
    assert (disk.exports.pool.num_used_blocks, blocks.pool.num_used_blocks) == (0, 0)
    assert admit(blocks, waiting) == 0
    blocks.check_integrity()
