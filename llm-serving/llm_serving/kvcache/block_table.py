"""The blocks of one request, in the order of its tokens.

Names of full blocks: equal names, equal keys and values.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import blake2b

from llm_serving.core.step import NO_BLOCK
from llm_serving.kvcache.block_pool import BlockPool


class BlockTable:
    """Block ids, and beside each the epoch in which the block was given to whoever wrote it.

    A WorkAgent tags blocks with the epochs of those who write them. So a block that two requests hold by mistake, or
    that somebody reads after it was given away, is noticed where it happens. Both are 32-bit arrays: the tables of a
    step are put together without looking at single entries.

    The first `start` entries name no block: what stood there lies behind the window, and was given back or never taken.
    """

    __slots__ = ("epochs", "ids", "start")

    def __init__(self, ids: Iterable[int] = (), epochs: Iterable[int] = (), start: int = 0) -> None:
        """Blocks for the entries from `start` on."""
        self.start = start
        self.ids = array("i", [NO_BLOCK]) * start
        self.epochs = array("i", [0]) * start
        self.ids.extend(ids)
        self.epochs.extend(epochs)

    @classmethod
    def of(cls, pool: BlockPool, block_ids: Collection[int], start: int = 0) -> BlockTable:
        """Blocks as they are in the pool now, for the entries from `start` on."""
        return cls(block_ids, map(pool.epoch, block_ids), start)

    def extend(self, block_ids: Collection[int], pool: BlockPool) -> None:
        self.ids.extend(block_ids)
        self.epochs.extend(map(pool.epoch, block_ids))

    def drop_before(self, start: int) -> list[int]:
        """Leaves the entries before `start` without blocks; returns those that stood there."""
        first, count = self.start, start - self.start
        if count <= 0:
            return []
        block_ids = self.ids[first:start].tolist()
        self.ids[first:start] = array("i", [NO_BLOCK]) * count
        self.epochs[first:start] = array("i", [0]) * count
        self.start = start
        return block_ids

    @property
    def end(self) -> int:
        """Entries, with and without blocks."""
        return len(self.ids)

    def __len__(self) -> int:
        """Blocks."""
        return len(self.ids) - self.start

    def __iter__(self) -> Iterator[int]:
        """The ids of its blocks."""
        return iter(self.ids[self.start :] if self.start else self.ids)


DIGEST_BYTES = 16


def namespace_hash(namespace: str) -> bytes:
    """Where the chain of a namespace starts; blocks of different namespaces never have the same name."""
    return blake2b(namespace.encode(), digest_size=DIGEST_BYTES, person=b"namespace").digest()


def block_hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Name of the block that holds `token_ids` after the block named `previous`.

    A key or value depends on all tokens before it, so the name of a block chains the names of those before it. A
    cryptographic hash, since users choose the tokens: nobody can make two texts share a block.
    """
    return blake2b(previous + array("i", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()
