"""The transfer pool, through which replicas pass KV blocks to each other and to the disk cache."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Final, NamedTuple

from llm_serving.core.request import DiskPrefix, Request, Transfer
from llm_serving.core.step import BlockMove, BlockMoveKind
from llm_serving.kvcache.block_pool import BlockPool
from llm_serving.kvcache.block_table import BlockTable, block_moves

TransferBlock = tuple[int, int]
"""(block id, epoch). The ids are unique in the pool that all replicas share."""
MAX_EXPORTS: Final = 128


class TransferPool:
    """Allocates one replica's blocks in the transfer pool, the memory from which other replicas fetch KV blocks.

    A block is free, pending (the step that copies a KV block into it has no reply yet) or handed over to its reader:
    another replica or the disk cache. Only this replica's WorkAgent writes it, in the order of steps, so it can be
    allocated again once its reader has returned it. `first`: id of the first block. `last_epoch`: last allocation
    number (epoch) that an earlier engine used here, because epochs must not repeat.
    """

    def __init__(self, num_blocks: int = 0, first: int = 0, last_epoch: int = 0) -> None:
        self.pool = BlockPool(num_blocks, last_epoch)
        self._first = first
        self._pending: dict[str, tuple[BlockTable, int]] = {}
        self._handed_over: dict[int, int] = {}

    def allocate(self, request_id: str, start: int, end: int, num_tokens: int) -> BlockTable | None:
        count = end - start
        if count > self.pool.num_free_blocks:
            return None
        allocated = self.pool.allocate(count)
        table = BlockTable([self._first + each for each in allocated], map(self.pool.epoch, allocated), start)
        self._pending[request_id] = table, num_tokens
        return table

    def hand_over(self, request_id: str) -> Transfer:
        """Let a replica or the disk cache read a request's blocks, whose step has completed. Return their location."""
        table, num_tokens = self._pending.pop(request_id)
        ids, epochs = tuple(table.ids[table.start :]), tuple(table.epochs[table.start :])
        self._handed_over.update(zip(ids, epochs, strict=True))
        return Transfer(ids, epochs, table.start, num_tokens)

    def cancel(self, request_id: str) -> None:
        table, _ = self._pending.pop(request_id)
        self.pool.free(each - self._first for each in table)

    def reclaim(self, blocks: Iterable[TransferBlock]) -> None:
        """Free blocks that their readers have returned. Ignore blocks that an earlier engine handed over."""
        for block_id, epoch in blocks:
            if self._handed_over.get(block_id) == epoch:
                del self._handed_over[block_id]
                self.pool.free([block_id - self._first])

    def cancel_all(self) -> None:
        """Free all pending blocks, because the steps that copy KV blocks into them are lost."""
        for request_id in list(self._pending):
            self.cancel(request_id)

    def check_integrity(self) -> None:
        pending = chain.from_iterable(table for table, _ in self._pending.values())
        self.pool.check_integrity(each - self._first for each in chain(pending, self._handed_over))


class StoredBlocks(NamedTuple):
    """Full blocks of a prompt in the transfer pool, which the WorkAgent writes to disk."""

    key: str
    hashes: list[bytes]
    blocks: list[TransferBlock]


class DiskPrefixes:
    """KV blocks in the transfer pool (`TransferPool`) that were read from disk or will be written to it.

    The engine reads a prefix from disk before it adds a request. When the request is admitted, the blocks that the KV
    cache lacks are copied into it. A step that completes full blocks of a prompt copies those that the disk lacks into
    the transfer pool. If the transfer pool is full, the rest of the prompt is not stored, because a search for a prefix
    stops at the first block that is missing.
    """

    def __init__(self, block_size: int, exports: TransferPool) -> None:
        self.exports = exports
        self._block_size = block_size
        self._found: dict[str, BlockTable] = {}
        self._num_stored: dict[str, int] = {}
        """Request id -> number of blocks from the start of the prompt that are on disk or were exported."""
        self._released: list[TransferBlock] = []

    def add(self, request_id: str, prefix: DiskPrefix) -> None:
        self._num_stored[request_id] = prefix.num_stored
        if prefix.blocks:
            ids, epochs = zip(*prefix.blocks, strict=True)
            self._found[request_id] = BlockTable(ids, epochs, prefix.start)

    def free(self, request_id: str) -> None:
        self._num_stored.pop(request_id, None)
        if (found := self._found.pop(request_id, None)) is not None:
            self._released += found.blocks(found.start)

    def reset(self) -> None:
        for request_id in list(self._num_stored):
            self.free(request_id)
        self.exports.cancel_all()

    def imports(
        self, request_id: str, table: BlockTable, num_shared: int, hashes: list[bytes], pool: BlockPool
    ) -> list[BlockMove]:
        """Return copies from the transfer pool to a request's new table, after its `num_shared` shared blocks.

        Other requests can share these blocks at once, because a step copies blocks before it computes tokens.
        """
        found = self._found.pop(request_id, None)
        if found is None:
            return []
        self._released += found.blocks(found.start)
        if found.start > num_shared:  # the cache evicted blocks before `start` since the disk was read
            return []
        end, size = min(found.end, table.end), self._block_size
        for index in range(num_shared, end):
            pool.register_hash(table.ids[index], table.epochs[index], hashes[index])
        return block_moves(BlockMoveKind.IMPORT, (found,), (table,), num_shared, end * size, size)

    def stores(self, request_id: str) -> bool:
        return request_id in self._num_stored

    def store(
        self, request: Request, num_computed: int, table: BlockTable, hashes: list[bytes]
    ) -> tuple[StoredBlocks, list[BlockMove]] | None:
        """Plan to store the full prompt blocks that a step completes and the disk lacks. Return these blocks and their
        copies to the transfer pool, or None if there are none.

        `num_computed`: number of computed tokens after this step. `hashes`: hashes of the full blocks of the prompt.
        """
        start = self._num_stored[request.request_id]
        wanted = min(num_computed // self._block_size - start, len(hashes) - start, MAX_EXPORTS)
        stop = start + min(max(0, wanted), self.exports.pool.num_free_blocks)
        if stop - start < wanted or stop == len(hashes):
            del self._num_stored[request.request_id]
        else:
            self._num_stored[request.request_id] = stop
        if stop == start:
            return None
        key = f"{request.request_id} {start}"
        size = self._block_size
        target = self.exports.allocate(key, start, stop, stop * size)
        assert target is not None, "the free blocks were counted"
        moves = block_moves(BlockMoveKind.EXPORT, (table,), (target,), start, stop * size, size)
        return StoredBlocks(key, hashes[start:stop], target.blocks(start)), moves

    def pop_released(self) -> list[TransferBlock]:
        """Return the blocks read from disk that may be freed once the steps formed so far have run."""
        released, self._released = self._released, []
        return released
