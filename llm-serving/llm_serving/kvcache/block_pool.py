"""The blocks of the KV cache: free blocks, reference counts, and hashes of full blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

MAX_EPOCH: Final = 2**31 - 1


class BlockPool:
    """Allocates and frees the block ids 0 .. num_blocks - 1.

    A free block can be found by its hash until it is allocated again. Free blocks without a hash are allocated first.
    Next come those freed with `early=True`, then all others; in both groups, the least recently freed come first.
    """

    def __init__(self, num_blocks: int, last_epoch: int = 0) -> None:
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._early: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self._epochs = [0] * num_blocks
        self._num_allocations = last_epoch % MAX_EPOCH
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._blocks_by_hash: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self._early)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    @property
    def num_touched_blocks(self) -> int:
        """Number of blocks that were allocated at least once. Reading it takes time proportional to `num_blocks`."""
        return self.num_blocks - self._epochs.count(0)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._blocks_by_hash)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def epoch(self, block_id: int) -> int:
        """Return the sequence number of the block's latest allocation. It repeats after `MAX_EPOCH` allocations."""
        return self._epochs[block_id]

    def allocate(self, count: int) -> list[int]:
        assert count <= self.num_free_blocks, f"cannot allocate {count} blocks: {self.num_free_blocks} are free"
        block_ids = []
        for _ in range(count):
            source = self._free
            if self._early and not (source and self._hashes[next(iter(source))] is None):
                source = self._early
            block_id, _ = source.popitem(last=False)
            block_ids.append(block_id)
            self._ref_counts[block_id] = 1
            self._num_allocations = (self._num_allocations + 1) % MAX_EPOCH
            self._epochs[block_id] = self._num_allocations
            block_hash = self._hashes[block_id]
            if block_hash is not None:
                del self._blocks_by_hash[block_hash]
                self._hashes[block_id] = None
        return block_ids

    def add_references(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del (self._early if block_id in self._early else self._free)[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int], *, early: bool = False) -> None:
        """Drop one reference of each block. `early`: reallocate them before others, as reuse is less likely."""
        for block_id in block_ids:
            count = self._ref_counts[block_id]
            assert count > 0, f"block {block_id} freed twice"
            self._ref_counts[block_id] = count - 1
            if count == 1:
                if early and self._hashes[block_id] is not None:
                    self._early[block_id] = None
                    continue
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def register_hash(self, block_id: int, epoch: int, block_hash: bytes) -> None:
        """Let later requests find a block by its hash if no other block has it. `epoch`: the block's present epoch."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is free and cannot be cached"
        assert self._epochs[block_id] == epoch, f"block {block_id} was allocated again"
        if self._hashes[block_id] is None and block_hash not in self._blocks_by_hash:
            self._hashes[block_id] = block_hash
            self._blocks_by_hash[block_hash] = block_id

    def forget_hash(self, block_id: int) -> None:
        """Drop the hash of a block, if any. A free block is then the next to be allocated."""
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._blocks_by_hash[block_hash]
            self._hashes[block_id] = None
            if self._ref_counts[block_id] == 0:
                self._early.pop(block_id, None)
                self._free[block_id] = None
                self._free.move_to_end(block_id, last=False)

    def find_cached(self, block_hash: bytes) -> int | None:
        return self._blocks_by_hash.get(block_hash)

    @property
    def is_cached(self) -> Callable[[bytes], bool]:
        """Function that returns whether any block has the given hash. It stays valid when the pool changes."""
        return self._blocks_by_hash.__contains__

    def clear_hashes(self) -> None:
        for block_id in self._blocks_by_hash.values():
            self._hashes[block_id] = None
        self._blocks_by_hash.clear()

    def check_integrity(self, references: Iterable[int]) -> None:
        """Check the pool against `references`, a block id for each reference. Raise AssertionError if they differ."""
        expected = [0] * self.num_blocks
        for block_id in references:
            expected[block_id] += 1
        assert expected == self._ref_counts, "reference counts differ from the block tables"
        free = [*self._free, *self._early]
        is_unused = len({*free}) == len(free) == expected.count(0) and not any(expected[block_id] for block_id in free)
        assert is_unused, "a block is lost"
        num_cached = self.num_blocks - self._hashes.count(None)
        assert num_cached == len(self._blocks_by_hash), "a block has a hash that is not found"
        points_back = all(self._hashes[block_id] == each for each, block_id in self._blocks_by_hash.items())
        assert points_back, "a hash points to another block"
