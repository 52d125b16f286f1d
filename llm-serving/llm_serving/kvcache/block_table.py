"""The block table of a request, and the hashes of full blocks for prefix caching."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from hashlib import blake2b

from llm_serving.core.step import NO_BLOCK, BlockMove, BlockMoveKind
from llm_serving.kvcache.block_pool import BlockPool


class BlockTable:
    """Block ids in token order, each with the epoch of its allocation, as two arrays of 32-bit integers.

    The first `start` entries have no block, because the sliding window has passed them. A WorkAgent tags each block
    that it writes with the epoch in the step's table. So it detects two writers of a block, and reads of a block that
    was allocated again.
    """

    __slots__ = ("epochs", "ids", "start")

    def __init__(self, ids: Iterable[int] = (), epochs: Iterable[int] = (), start: int = 0) -> None:
        """`ids`, `epochs`: entries from index `start` on. The entries before it have no blocks."""
        self.start = start
        self.ids = array("i", [NO_BLOCK]) * start
        self.epochs = array("i", [0]) * start
        self.ids.extend(ids)
        self.epochs.extend(epochs)

    @classmethod
    def of(cls, pool: BlockPool, block_ids: Collection[int], start: int = 0) -> BlockTable:
        """Return a table of the blocks `block_ids`, each with its current epoch. The first block is entry `start`."""
        return cls(block_ids, map(pool.epoch, block_ids), start)

    def extend(self, block_ids: Collection[int], pool: BlockPool) -> None:
        self.ids.extend(block_ids)
        self.epochs.extend(map(pool.epoch, block_ids))

    def drop_before(self, start: int) -> list[int]:
        """Remove the blocks of the entries before `start`. Return their ids."""
        first, count = self.start, start - self.start
        if count <= 0:
            return []
        block_ids = self.ids[first:start].tolist()
        self.ids[first:start] = array("i", [NO_BLOCK]) * count
        self.epochs[first:start] = array("i", [0]) * count
        self.start = start
        return block_ids

    def blocks(self, start: int) -> list[tuple[int, int]]:
        """Return (block id, epoch) of the entries from `start` on. All of them must have blocks."""
        return list(zip(self.ids[start:], self.epochs[start:], strict=True))

    def split(self, starts: Sequence[int], num_tokens: int, block_size: int) -> Tables:
        """Split this table, in which the blocks of several groups follow one another, into one table for each group.

        `starts`: index of the first entry with a block in each table. Each table ends with the block of token
        `num_tokens` - 1. If there is only one group, it gets all blocks.
        """
        if len(starts) == 1:
            return (self,)
        tables, at, end = [], self.start, -(-num_tokens // block_size)
        for start in starts:
            stop = at + end - start
            tables.append(BlockTable(self.ids[at:stop], self.epochs[at:stop], start))
            at = stop
        return tuple(tables)

    @property
    def end(self) -> int:
        return len(self.ids)

    def __len__(self) -> int:
        return len(self.ids) - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids[self.start :] if self.start else self.ids)


Tables = tuple[BlockTable, ...]


def block_moves(
    kind: BlockMoveKind, sources: Tables, targets: Tables, start: int, num_tokens: int, block_size: int
) -> list[BlockMove]:
    """Return the moves of the first `num_tokens` tokens between the same entries of two requests' tables.

    The moves begin at entry `start`, or at the first entry with a block in the target, if that is later.
    """
    moves = []
    for source, target in zip(sources, targets, strict=True):
        for index in range(max(start, target.start), -(-num_tokens // block_size)):
            blocks = source.ids[index], target.ids[index], source.epochs[index], target.epochs[index]
            moves.append(BlockMove(int(kind), *blocks, min(num_tokens - index * block_size, block_size)))
    return moves


DIGEST_BYTES = 16


def namespace_hash(namespace: str) -> bytes:
    """Return the hash before the first block of a namespace. Blocks of different namespaces have different hashes."""
    return blake2b(namespace.encode(), digest_size=DIGEST_BYTES, person=b"namespace").digest()


def block_hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a block that holds `token_ids`. `previous`: hash of the block before it.

    Hashes form a chain, because keys and values depend on all earlier tokens. They are cryptographic, because clients
    choose the tokens and must not find two texts with the same block hash.
    """
    return blake2b(previous + array("i", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()
