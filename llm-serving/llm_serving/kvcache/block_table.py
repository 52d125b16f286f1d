"""Block tables of requests, hashes of full blocks, and the search for a computed prefix that a request can share."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from llm_serving.core.step import NO_BLOCK, BlockMove, BlockMoveKind
from llm_serving.core.window import Window
from llm_serving.kvcache.block_pool import BlockPool

DIGEST_BYTES = 16


class BlockTable:
    """Block ids in token order, each with the epoch of its allocation.

    The first `start` entries have no block, because the sliding window has passed them. A WorkAgent tags the blocks
    that it writes with these epochs, and so detects two writers of a block, and reads of a block that was reallocated.
    """

    __slots__ = ("epochs", "ids", "start")

    def __init__(self, ids: Iterable[int] = (), epochs: Iterable[int] = (), start: int = 0) -> None:
        self.start = start
        self.ids = array("i", [NO_BLOCK]) * start
        self.epochs = array("i", [0]) * start
        self.ids.extend(ids)
        self.epochs.extend(epochs)

    @classmethod
    def of(cls, pool: BlockPool, block_ids: Collection[int], start: int = 0) -> BlockTable:
        return cls(block_ids, map(pool.epoch, block_ids), start)

    def extend(self, block_ids: Collection[int], pool: BlockPool) -> None:
        self.ids.extend(block_ids)
        self.epochs.extend(map(pool.epoch, block_ids))

    def drop_before(self, start: int) -> list[int]:
        first, count = self.start, start - self.start
        if count <= 0:
            return []
        block_ids = self.ids[first:start].tolist()
        self.ids[first:start] = array("i", [NO_BLOCK]) * count
        self.epochs[first:start] = array("i", [0]) * count
        self.start = start
        return block_ids

    def blocks(self, start: int) -> list[tuple[int, int]]:
        return list(zip(self.ids[start:], self.epochs[start:], strict=True))

    def split(self, starts: Sequence[int], num_tokens: int, block_size: int) -> Tables:
        """Split a table that holds the blocks of several groups of layers, one group after another. Return a table for
        each.

        `starts`: each group's first entry with a block. A returned table ends with the block of the last token.
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
    """Return copies from `sources` to `targets`, from block `start` to the block of the last of `num_tokens` tokens."""
    moves = []
    for source, target in zip(sources, targets, strict=True):
        for index in range(max(start, target.start), -(-num_tokens // block_size)):
            blocks = source.ids[index], target.ids[index], source.epochs[index], target.epochs[index]
            moves.append(BlockMove(int(kind), *blocks, min(num_tokens - index * block_size, block_size)))
    return moves


def namespace_hash(namespace: str) -> bytes:
    return blake2b(namespace.encode(), digest_size=DIGEST_BYTES, person=b"namespace").digest()


def block_hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """Return a block's hash, chained to `previous`. It is cryptographic, because clients could construct collisions."""
    return blake2b(previous + array("i", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()


def group_hash(block_hash: bytes, group: int) -> bytes:
    return block_hash + bytes((group,)) if group else block_hash


def kept_ends(hashes: Sequence[bytes], pool: BlockPool, num_shared: int, num_prompt_blocks: int) -> tuple[int, ...]:
    """Return the lengths, in blocks, of up to three prefixes that later prompts are likely to share: the prefix that
    this request shares, the longest prefix in the cache, and the whole prompt.
    """
    num_cached = next((at for at, each in enumerate(hashes) if pool.find_cached(each) is None), len(hashes))
    return tuple(sorted({num_shared, num_cached, num_prompt_blocks} - {0}))


@dataclass(eq=False, slots=True)
class PrefixSearch:
    """The cached blocks of one request's prefix.

    A prefix of n blocks can be shared if each group of layers has those blocks to which the next token attends. These
    are all n blocks or, in a group with a window, the blocks within the window.
    """

    _windows: Sequence[Window]
    _block_size: int
    _pool: BlockPool
    _sources: Tables
    """Tables of a fork's parent, whose first `_num_common` blocks can be shared; () without a parent."""
    _num_common: int
    _hashes: Sequence[bytes]

    def tables(self, is_checkpoint: Callable[[bytes], bool] | None) -> Tables:
        """Return the tables of the longest prefix that can be shared.

        `is_checkpoint(hash)` is true if a recurrent state is stored after the block with this hash, so that a prefix
        may end with the block. It is None if the model has no such states. A prefix may then end with any block.
        """
        found: list[list[int]] = []
        limit = max(self._num_common, len(self._hashes))
        runs: dict[Window, list[int]] = {}
        for group, window in enumerate(self._windows):
            blocks = self._find(group, limit, stops=not window.is_sliding)
            found.append(blocks)
            limit = len(blocks)
            if window.is_sliding:
                of_group = _runs(blocks)
                runs[window] = list(map(min, runs.get(window, of_group), of_group))
        for end in range(limit, 0, -1):
            if is_checkpoint is not None and not (self._hashes and is_checkpoint(self._hashes[end - 1])):
                continue
            if all(run[end - 1] >= end - self._start(window, end) for window, run in runs.items()):
                return tuple(
                    self._table(group, found[group], self._start(window, end), end)
                    for group, window in enumerate(self._windows)
                )
        return tuple([BlockTable() for _ in self._windows])

    def _start(self, window: Window, end: int) -> int:
        return window.first_block(end * self._block_size, self._block_size)

    def _find(self, group: int, limit: int, *, stops: bool) -> list[int]:
        """Return a layer group's first `limit` block ids. A missing one is `NO_BLOCK` or, if `stops`, ends the list."""
        blocks: list[int] = []
        find, hashes, num_common, start = self._pool.find_cached, self._hashes, self._num_common, 0
        if self._sources:
            source, start = self._sources[group].ids, self._sources[group].start
        for index in range(limit):
            if start <= index < num_common:
                blocks.append(source[index])
                continue
            found = None
            if hashes:
                found = find(group_hash(hashes[index], group) if group else hashes[index])
            if found is None and stops:
                break
            blocks.append(NO_BLOCK if found is None else found)
        return blocks

    def _table(self, group: int, blocks: Sequence[int], start: int, end: int) -> BlockTable:
        table = BlockTable.of(self._pool, blocks[start:end], start)
        if self._sources:  # shared blocks have the epochs of the source's table
            source = self._sources[group]
            shared = slice(max(start, source.start), max(start, source.start, min(end, self._num_common)))
            table.epochs[shared] = source.epochs[shared]
        return table


def _runs(blocks: Sequence[int]) -> list[int]:
    runs, run = [], 0
    for block in blocks:
        run = 0 if block == NO_BLOCK else run + 1
        runs.append(run)
    return runs
