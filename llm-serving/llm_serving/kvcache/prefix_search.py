"""Search for the longest computed prefix that a request can share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llm_serving.core.step import NO_BLOCK
from llm_serving.core.window import Window
from llm_serving.kvcache.block_pool import BlockPool
from llm_serving.kvcache.block_table import BlockTable, Tables


def group_hash(block_hash: bytes, group: int) -> bytes:
    """Return the hash of a block of the layer group `group`. For the first group, it is `block_hash` itself."""
    return block_hash + bytes((group,)) if group else block_hash


def kept_ends(hashes: Sequence[bytes], pool: BlockPool, num_shared: int, num_prompt_blocks: int) -> tuple[int, ...]:
    """Return the prefix lengths, in blocks, after which later prompts probably differ from this one.

    They are: the length of the prefix that the request shares, the length of the prefix that the first group of layers
    has in the cache, and `num_prompt_blocks`. `hashes`: hashes of the request's first full blocks.
    """
    num_cached = next((at for at, each in enumerate(hashes) if pool.find_cached(each) is None), len(hashes))
    return tuple(sorted({num_shared, num_cached, num_prompt_blocks} - {0}))


class PrefixSearch:
    """The cached blocks of one request's prefix.

    A prefix of n blocks can be shared if each group of layers has those blocks to which the next token attends: all n,
    or, with a window, those of the window.
    """

    def __init__(
        self,
        windows: Sequence[Window],
        block_size: int,
        pool: BlockPool,
        sources: Tables,
        num_common: int,
        hashes: Sequence[bytes],
    ) -> None:
        """Args:
        sources: Tables of a running request whose first `num_common` blocks can be shared; empty: no such request.
        hashes: Hashes of the request's first full blocks.
        """
        self._windows, self._block_size, self._pool = windows, block_size, pool
        self._sources, self._num_common, self._hashes = sources, num_common, hashes

    def tables(self, is_checkpoint: Callable[[bytes], bool] | None) -> Tables:
        """Return the tables of the longest prefix, one for each group.

        `is_checkpoint`: returns whether a prefix may end with the block of a hash. None: it may end with any block.
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
        """Return a group's first `limit` block ids. A missing block is `NO_BLOCK`; if `stops`, it ends the list."""
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
        if self._sources:  # the request expects the epochs that the other one does
            source = self._sources[group]
            shared = slice(max(start, source.start), max(start, source.start, min(end, self._num_common)))
            table.epochs[shared] = source.epochs[shared]
        return table


def _runs(blocks: Sequence[int]) -> list[int]:
    """Return for each block the length of the gapless run of blocks that ends with it."""
    runs, run = [], 0
    for block in blocks:
        run = 0 if block == NO_BLOCK else run + 1
        runs.append(run)
    return runs
