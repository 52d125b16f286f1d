"""The blocks of one request, in the order of its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from llm_serving.kvcache.block_pool import BlockPool


class BlockTable:
    """Block ids, and beside each the epoch in which the block was given to whoever wrote it.

    A WorkAgent tags blocks with the epochs of those who write them. So a block that two requests hold by mistake, or
    that somebody reads after it was given away, is noticed where it happens. Both are 32-bit arrays: the tables of a
    step are put together without looking at single entries.
    """

    __slots__ = ("epochs", "ids")

    def __init__(self, block_ids: Iterable[int], pool: BlockPool) -> None:
        self.ids = array("i")
        self.epochs = array("i")
        self.extend(block_ids, pool)

    def extend(self, block_ids: Iterable[int], pool: BlockPool) -> None:
        block_ids = list(block_ids)
        self.ids.extend(block_ids)
        self.epochs.extend(pool.epoch(block_id) for block_id in block_ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)
