"""The blocks of the key/value cache: which are free, how often each is used, which can be found by their content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

MAX_EPOCH: Final = 2**31 - 1


class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1 and takes them back.

    A block is free or has a reference count of at least one: free + used == all, at every moment. A free block may
    still be found by the name of its content; it loses the name when it is handed out for something else. Nameless
    blocks are handed out first, the latest freed before the others; then named ones, the longest unused first.
    """

    def __init__(self, num_blocks: int, last_epoch: int = 0) -> None:
        """Epochs go on behind `last_epoch`."""
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        """In the order in which they are handed out."""
        self._ref_counts = [0] * num_blocks
        self._epochs = [0] * num_blocks
        self._num_allocations = last_epoch % MAX_EPOCH
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._blocks_by_hash: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks, free or used, that can be found by name."""
        return len(self._blocks_by_hash)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def epoch(self, block_id: int) -> int:
        """Tells this owner of the block from those before it: no two that are near in time have the same."""
        return self._epochs[block_id]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, each with one reference; the caller has asked `num_free_blocks` before."""
        assert count <= len(self._free), f"asked for {count} blocks, {len(self._free)} are free"
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
            self._num_allocations = (self._num_allocations + 1) % MAX_EPOCH
            self._epochs[block_id] = self._num_allocations
            name = self._hashes[block_id]
            if name is not None:
                del self._blocks_by_hash[name]
                self._hashes[block_id] = None
        return block_ids

    def add_references(self, block_ids: Iterable[int]) -> None:
        """Adds one reference to each block, free ones included."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drops one reference of each block; those without any are free again."""
        for block_id in block_ids:
            count = self._ref_counts[block_id]
            assert count > 0, f"block {block_id} freed twice"
            self._ref_counts[block_id] = count - 1
            if count == 1:
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def register_hash(self, block_id: int, epoch: int, name: bytes) -> None:
        """Lets the block of an owner be found; where two have the same content, the first keeps the name."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is free and cannot be named"
        assert self._epochs[block_id] == epoch, f"block {block_id} belongs to somebody else"
        if self._hashes[block_id] is None and name not in self._blocks_by_hash:
            self._hashes[block_id] = name
            self._blocks_by_hash[name] = block_id

    def find_cached(self, name: bytes) -> int | None:
        """The block whose content has this name, free or used."""
        return self._blocks_by_hash.get(name)

    @property
    def is_cached(self) -> Callable[[bytes], bool]:
        """Tells whether there is a block of this name; good for as long as the pool is."""
        return self._blocks_by_hash.__contains__

    def clear_hashes(self) -> None:
        """Takes all names away: what the blocks hold is no longer known."""
        for block_id in self._blocks_by_hash.values():
            self._hashes[block_id] = None
        self._blocks_by_hash.clear()

    def check_integrity(self, references: Iterable[int]) -> None:
        """Raises AssertionError unless free + used == all and `references` (one entry a use) match the counts."""
        expected = [0] * self.num_blocks
        for block_id in references:
            expected[block_id] += 1
        assert expected == self._ref_counts, "reference counts differ from the block tables"
        is_unused = len(self._free) == expected.count(0) and not any(expected[block_id] for block_id in self._free)
        assert is_unused, "a block is lost"
        num_named = self.num_blocks - self._hashes.count(None)
        assert num_named == len(self._blocks_by_hash), "a block has a name that is not found"
        points_back = all(self._hashes[block_id] == name for name, block_id in self._blocks_by_hash.items())
        assert points_back, "a name points elsewhere"
