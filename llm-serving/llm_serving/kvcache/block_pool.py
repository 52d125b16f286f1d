"""The blocks of the key/value cache: which are free, how often each is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1 and takes them back.

    A block is free or has a reference count of at least one: free + used == all, at every moment. Freed blocks are
    reused in the order they came back, so equal histories give equal block ids.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._ref_counts = [0] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, each with one reference; the caller has asked `num_free_blocks` before."""
        assert count <= len(self._free), f"asked for {count} blocks, {len(self._free)} are free"
        block_ids = [self._free.popleft() for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def free(self, block_ids: Iterable[int]) -> None:
        """Drops one reference of each block; those without any are free again, in the order given."""
        for block_id in block_ids:
            count = self._ref_counts[block_id]
            assert count > 0, f"block {block_id} freed twice"
            self._ref_counts[block_id] = count - 1
            if count == 1:
                self._free.append(block_id)

    def check_integrity(self, references: Iterable[int]) -> None:
        """Raises AssertionError unless free + used == all and `references` (one entry a use) match the counts."""
        expected = [0] * self.num_blocks
        for block_id in references:
            expected[block_id] += 1
        assert expected == self._ref_counts, "reference counts differ from the block tables"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert all((block_id in free) == (count == 0) for block_id, count in enumerate(expected)), "a block is lost"
