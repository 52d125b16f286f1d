"""The blocks of one request, in the order of its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator

from llm_serving.kvcache.block_pool import BlockPool


class BlockTable:
    """Block ids, and beside each the epoch in which the block was given to whoever wrote it.

    A WorkAgent tags blocks with the epochs of those who write them. So a block that two requests hold by mistake, or
    that somebody reads after it was given away, is noticed where it happens. Both are 32-bit arrays: the tables of a
    step are put together without looking at single entries.
    """

    __slots__ = ("epochs", "ids")

    def __init__(self, ids: Iterable[int] = (), epochs: Iterable[int] = ()) -> None:
        self.ids = array("i", ids)
        self.epochs = array("i", epochs)

    @classmethod
    def of(cls, pool: BlockPool, block_ids: Collection[int]) -> BlockTable:
        """Blocks as they are in the pool now."""
        return cls(block_ids, map(pool.epoch, block_ids))

    def extend(self, block_ids: Collection[int], pool: BlockPool) -> None:
        self.ids.extend(block_ids)
        self.epochs.extend(map(pool.epoch, block_ids))

    def beginning(self, count: int) -> BlockTable:
        """The first `count` blocks as they are here, whatever the pool may have done with them since."""
        return BlockTable(self.ids[:count], self.epochs[:count])

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)
