"""The part of the transfer pool that one replica writes: blocks in which its requests go to others."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from llm_serving.core.kv_transfer import Transfer
from llm_serving.kvcache.block_pool import BlockPool
from llm_serving.kvcache.block_table import BlockTable

TransferBlock = tuple[int, int]
"""A block of the transfer pool, as all replicas call it, and its epoch."""


class TransferPool:
    """Only this replica's WorkAgent writes these blocks, in the order of its steps, so one may be given away as soon as
    who read it says so: whatever was submitted before is done before the next owner's first write.

    A block is free, or its request still has to leave, or another replica has it: that one gives it back.

    Args:
        num_blocks: There are; 0: no request leaves.
        first: Name of the first of them among those of all replicas.
        last_epoch: Blocks have later ones. Another engine that has the same part begins elsewhere.
    """

    def __init__(self, num_blocks: int = 0, first: int = 0, last_epoch: int = 0) -> None:
        self.pool = BlockPool(num_blocks, last_epoch)
        self._first = first
        self._pending: dict[str, tuple[BlockTable, int]] = {}
        """Of requests whose last step here has been formed: their blocks, and whose tokens these hold."""
        self._handed_over: dict[int, int] = {}
        """Block -> epoch, of those that others have."""

    def allocate(self, request_id: str, start: int, end: int, num_tokens: int) -> BlockTable | None:
        """Blocks for the entries [start, end) of a table, to hold `num_tokens`; None: there are not so many."""
        count = end - start
        if count > self.pool.num_free_blocks:
            return None
        taken = self.pool.allocate(count)
        table = BlockTable([self._first + each for each in taken], map(self.pool.epoch, taken), start)
        self._pending[request_id] = table, num_tokens
        return table

    def hand_over(self, request_id: str) -> Transfer:
        """The step that fills the request's blocks is done: another replica gets them."""
        table, num_tokens = self._pending.pop(request_id)
        ids, epochs = tuple(table.ids[table.start :]), tuple(table.epochs[table.start :])
        self._handed_over.update(zip(ids, epochs, strict=True))
        return Transfer(ids, epochs, table.start, num_tokens)

    def cancel(self, request_id: str) -> None:
        """The request ends, or is not to leave with these blocks."""
        table, _ = self._pending.pop(request_id)
        self.pool.free(each - self._first for each in table)

    def reclaim(self, blocks: Iterable[TransferBlock]) -> None:
        """Others need these no longer. What another engine gave away is none of ours."""
        for block_id, epoch in blocks:
            if self._handed_over.get(block_id) == epoch:
                del self._handed_over[block_id]
                self.pool.free([block_id - self._first])

    def cancel_all(self) -> None:
        """What was to be written never will be; what others have is there."""
        for request_id in list(self._pending):
            self.cancel(request_id)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is free, about to leave or away."""
        leaving = chain.from_iterable(table for table, _ in self._pending.values())
        self.pool.check_integrity(each - self._first for each in chain(leaving, self._handed_over))
