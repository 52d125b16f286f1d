"""The block table of every request."""

from __future__ import annotations

from llm_serving.kvcache.block_pool import BlockPool


class BlockManager:
    """Gives each request the blocks its tokens need and takes them back.

    The table of a request lists its blocks in order: token i lives in block `table[i // block_size]` at offset
    `i % block_size`. A table only grows, until the request is freed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._tables: dict[str, list[int]] = {}

    @property
    def usage(self) -> float:
        """Used share of the blocks, 0.0 to 1.0."""
        return self.pool.num_used_blocks / self.pool.num_blocks

    @property
    def num_slots(self) -> int:
        """Tokens that the whole cache can hold."""
        return self.pool.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether an empty cache has room for a request of this many tokens."""
        return self.num_blocks_for(num_tokens) <= self.pool.num_blocks

    def can_admit(self, num_tokens: int, reserve: int) -> bool:
        """Whether a new request of `num_tokens` fits and leaves `reserve` blocks free.

        The watermark: with one block kept for each running request, none is preempted before it has filled a block.
        """
        return self.num_blocks_for(num_tokens) + reserve <= self.pool.num_free_blocks

    def can_grow(self, request_id: str, num_tokens: int) -> bool:
        """Whether the request's table can be made to hold `num_tokens`."""
        return self._missing(request_id, num_tokens) <= self.pool.num_free_blocks

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Makes the request's table hold `num_tokens`; the caller has asked `can_grow` or `can_admit` before."""
        missing = self._missing(request_id, num_tokens)
        if missing > 0:
            self._tables.setdefault(request_id, []).extend(self.pool.allocate(missing))

    def free(self, request_id: str) -> None:
        """Returns all blocks of the request, the last one first: it is the least useful. None held is fine."""
        self.pool.free(reversed(self._tables.pop(request_id, [])))

    def block_table(self, request_id: str) -> list[int]:
        """Block ids in token order. The list is the manager's own: read it, do not keep it."""
        return self._tables.get(request_id, [])

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is free or in exactly as many tables as its count says."""
        self.pool.check_integrity(block_id for table in self._tables.values() for block_id in table)

    def _missing(self, request_id: str, num_tokens: int) -> int:
        return self.num_blocks_for(num_tokens) - len(self._tables.get(request_id, ()))
