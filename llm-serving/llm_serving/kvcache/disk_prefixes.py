"""The scheduler's part of the disk cache: blocks that were read from disk, and blocks that will be written to it."""

from __future__ import annotations

from typing import Final, NamedTuple

from llm_serving.core.foreign_blocks import DiskPrefix
from llm_serving.core.request import Request
from llm_serving.core.step import BlockMove, BlockMoveKind
from llm_serving.kvcache.block_pool import BlockPool
from llm_serving.kvcache.block_table import BlockTable
from llm_serving.kvcache.transfer_pool import TransferBlock, TransferPool

MAX_EXPORTS: Final = 128
"""Maximum number of blocks that one row of a step exports. The step waits for these copies."""


class StoredBlocks(NamedTuple):
    """Full blocks of a prompt in the transfer pool, which the WorkAgent writes to disk."""

    key: str
    """Key of the export in `DiskPrefixes.exports`."""
    hashes: list[bytes]
    blocks: list[TransferBlock]


class DiskPrefixes:
    """Blocks in the transfer pool that were read from disk or will be written to it.

    The engine reads a prefix from disk before it adds a request (`Request.disk_prefix`). At its admission, the request
    imports those blocks that are not in the KV cache. A step that completes full blocks of a prompt exports those that
    are not on disk. If the transfer pool is full, the rest of the prompt is not stored, because a prefix is found only
    from its start.
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
        """Drop all blocks, because the steps that wrote or would have read them are lost."""
        for request_id in list(self._num_stored):
            self.free(request_id)
        self.exports.cancel_all()

    def imports(
        self, request_id: str, table: BlockTable, num_shared: int, hashes: list[bytes], pool: BlockPool
    ) -> list[BlockMove]:
        """Return the moves that import a request's blocks into its new table, after its `num_shared` shared blocks.

        Afterwards the blocks that were read from disk are released. Other requests can share the imported blocks at
        once, because a step executes its moves before it computes tokens.
        """
        found = self._found.pop(request_id, None)
        if found is None:
            return []
        self._released += found.blocks(found.start)
        if found.start > num_shared:  # the cache evicted blocks before `start` since the disk was read
            return []
        moves = []
        for index in range(num_shared, min(found.end, table.end)):
            blocks = found.ids[index], table.ids[index], found.epochs[index], table.epochs[index]
            moves.append(BlockMove(int(BlockMoveKind.IMPORT), *blocks, self._block_size))
            pool.register_hash(table.ids[index], table.epochs[index], hashes[index])
        return moves

    def stores(self, request_id: str) -> bool:
        """Return whether further blocks of the request's prompt may be written to disk."""
        return request_id in self._num_stored

    def store(
        self, request: Request, num_computed: int, table: BlockTable, hashes: list[bytes]
    ) -> tuple[StoredBlocks, list[BlockMove]] | None:
        """Export the full blocks of a prompt that a step completes and that are not on disk.

        Return the blocks and the moves for the step; None: there are none.

        Args:
            num_computed: Computed tokens after this step.
            hashes: Hashes of the full blocks of the prompt.
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
        target = self.exports.allocate(key, start, stop, stop * self._block_size)
        assert target is not None, "the free blocks were counted"
        moves = []
        for index in range(start, stop):
            blocks = table.ids[index], target.ids[index], table.epochs[index], target.epochs[index]
            moves.append(BlockMove(int(BlockMoveKind.EXPORT), *blocks, self._block_size))
        return StoredBlocks(key, hashes[start:stop], target.blocks(start)), moves

    def pop_released(self) -> list[TransferBlock]:
        """Return the blocks released since the last call. They can be reused after the steps formed so far."""
        if not self._released:
            return []
        released, self._released = self._released, []
        return released
