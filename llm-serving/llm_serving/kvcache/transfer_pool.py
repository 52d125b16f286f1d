"""The transfer pool, through which replicas pass KV blocks to each other."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from llm_serving.core.foreign_blocks import Transfer
from llm_serving.kvcache.block_pool import BlockPool
from llm_serving.kvcache.block_table import BlockTable

TransferBlock = tuple[int, int]
"""(block id, epoch). The ids are unique in the pool that all replicas share."""


class TransferPool:
    """Allocates the blocks of one replica's part of the transfer pool.

    A block is free, pending (its exporting step has no reply yet) or handed over to another replica. Only this
    replica's WorkAgent writes the block, in the order of steps. So the block can be allocated again once its reader has
    returned it (`reclaim`).

    Args:
        num_blocks: 0: requests do not migrate.
        first: Id of the first block.
        last_epoch: The first allocation has the next epoch. Engines that use the same part one after another must not
            repeat epochs.
    """

    def __init__(self, num_blocks: int = 0, first: int = 0, last_epoch: int = 0) -> None:
        self.pool = BlockPool(num_blocks, last_epoch)
        self._first = first
        self._pending: dict[str, tuple[BlockTable, int]] = {}
        self._handed_over: dict[int, int] = {}
        """Id of a block that another replica may read -> its epoch."""

    def allocate(self, request_id: str, start: int, end: int, num_tokens: int) -> BlockTable | None:
        """Allocate blocks for the entries [start, end) of a table of `num_tokens` tokens; None: too few are free."""
        count = end - start
        if count > self.pool.num_free_blocks:
            return None
        allocated = self.pool.allocate(count)
        table = BlockTable([self._first + each for each in allocated], map(self.pool.epoch, allocated), start)
        self._pending[request_id] = table, num_tokens
        return table

    def hand_over(self, request_id: str) -> Transfer:
        """Hand a request's blocks over to another replica. The reply to the exporting step must have arrived."""
        table, num_tokens = self._pending.pop(request_id)
        ids, epochs = tuple(table.ids[table.start :]), tuple(table.epochs[table.start :])
        self._handed_over.update(zip(ids, epochs, strict=True))
        return Transfer(ids, epochs, table.start, num_tokens)

    def cancel(self, request_id: str) -> None:
        """Free the pending blocks of a request that does not migrate."""
        table, _ = self._pending.pop(request_id)
        self.pool.free(each - self._first for each in table)

    def reclaim(self, blocks: Iterable[TransferBlock]) -> None:
        """Free blocks that other replicas have imported. Blocks of an earlier engine are ignored."""
        for block_id, epoch in blocks:
            if self._handed_over.get(block_id) == epoch:
                del self._handed_over[block_id]
                self.pool.free([block_id - self._first])

    def cancel_all(self) -> None:
        """Free all pending blocks, because the steps that export them are lost."""
        for request_id in list(self._pending):
            self.cancel(request_id)

    def check_integrity(self) -> None:
        pending = chain.from_iterable(table for table, _ in self._pending.values())
        self.pool.check_integrity(each - self._first for each in chain(pending, self._handed_over))
