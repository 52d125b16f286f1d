"""The block table of every request: what it shares, what it owns, and where it waits when it has no room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from llm_serving.core.request import Request
from llm_serving.core.step import BlockMove, Move
from llm_serving.kvcache.block_hash import block_hash, namespace_hash
from llm_serving.kvcache.block_pool import BlockPool
from llm_serving.kvcache.block_table import BlockTable


class BlockManager:
    """Gives each request the blocks its tokens need and takes them back.

    The table of a request lists its blocks in order: token i lives in block `table[i // block_size]` at offset
    `i % block_size`. A table only grows, until the request gives it up.

    Only full blocks are shared: with earlier requests of the same namespace that began with the same tokens (found by
    name), and with the request it was forked from. A block that is shared is never written again; where a fork begins
    inside a block, it gets a copy of it.

    Moves of whole blocks are collected in the order in which they were decided; a step takes them and does them before
    it computes, so whatever was submitted before still finds the old content.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, num_swap_blocks: int = 0, prefix_caching: bool = True
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_swap_blocks)
        """Blocks in host memory, where swapped requests wait."""
        self.block_size = block_size
        self._prefix_caching = prefix_caching
        self._tables: dict[str, BlockTable] = {}
        self._host_tables: dict[str, BlockTable] = {}
        self._names: dict[str, list[bytes]] = {}
        """Names of the first full blocks of each request, as far as they were asked for."""
        self._moves: list[Move] = []

    # --- how much there is ------------------------------------------------------------------------------------------

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

    def num_blocks_held(self, request_id: str) -> int:
        return len(self._tables.get(request_id, ()))

    @property
    def num_swapped_requests(self) -> int:
        """Requests that wait in the host pool."""
        return len(self._host_tables)

    @property
    def tables(self) -> Mapping[str, BlockTable]:
        """The table of each request that has blocks; for those who look at all of them."""
        return self._tables

    def table(self, request_id: str) -> BlockTable:
        """The blocks of a request that has some. The table is the manager's own: read it, do not keep it."""
        return self._tables[request_id]

    def block_table(self, request_id: str) -> list[int]:
        """Block ids in token order; none for a request without blocks."""
        return list(self._tables.get(request_id, ()))

    # --- beginning --------------------------------------------------------------------------------------------------

    def num_blocks_to_admit(
        self, request: Request, num_tokens: int, parent: Request | None = None, without: Sequence[Request] = ()
    ) -> int:
        """Free blocks that `admit` would take; shared blocks that others use count nothing.

        With `without`, blocks that must be free now for `admit` after these have given up their tables.
        """
        uses = Counter(block_id for other in without for block_id in self.block_table(other.request_id))
        num_released = sum(self.pool.ref_count(block_id) == count for block_id, count in uses.items())
        total = self.num_blocks_for(num_tokens) - num_released
        if self.is_swapped(request.request_id):
            return total
        shared = self._shared_blocks(request, None if parent in without else parent)
        return total - sum(self.pool.ref_count(block_id) > uses[block_id] for block_id in shared)

    def admit(self, request: Request, num_tokens: int, parent: Request | None = None) -> int:
        """Gives a request without a table one for `num_tokens`; the caller has asked `num_blocks_to_admit` before.

        With `parent`, a request that runs, what both have in common and the parent has computed is taken from it.

        Returns:
            How many of its tokens are in those blocks already; at least one of the tokens known is not among them.
        """
        request_id = request.request_id
        assert request_id not in self._tables, f"request {request_id} has blocks already"
        if self.is_swapped(request_id):
            host_table = self._host_tables.pop(request_id)
            table = BlockTable.of(self.pool, self.pool.allocate(self.num_blocks_for(num_tokens)))
            self._move(BlockMove.SWAP_IN, host_table, table, 0, request.num_computed_tokens)
            self.host_pool.free(host_table)
            self._tables[request_id] = table
            return request.num_computed_tokens
        table = self._shared_blocks(request, parent)
        num_shared = len(table) * self.block_size
        self.pool.reference(table)
        table.extend(self.pool.allocate(self.num_blocks_for(num_tokens) - len(table)), self.pool)
        self._tables[request_id] = table
        if parent is None:
            return num_shared
        common = self._num_common_tokens(request, parent)
        self._move(BlockMove.COPY, self._tables[parent.request_id], table, num_shared, common)
        return max(num_shared, common)

    def can_grow(self, request_id: str, num_tokens: int) -> bool:
        """Whether the request's table can be made to hold `num_tokens`."""
        return self._missing(request_id, num_tokens) <= self.pool.num_free_blocks

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Makes the request's table hold `num_tokens`; the caller has asked `can_grow` before."""
        missing = self._missing(request_id, num_tokens)
        if missing > 0:
            self._tables[request_id].extend(self.pool.allocate(missing), self.pool)

    def name_blocks(self, request: Request, num_tokens: int) -> None:
        """Lets others find the full blocks among the first `num_tokens`, which have been computed and are known."""
        if not self._prefix_caching:
            return
        table = self._tables[request.request_id]
        num_named = min(num_tokens, request.num_tokens_known) // self.block_size
        names = self._block_names(request, num_named)
        for index in range(request.num_confirmed_tokens // self.block_size, num_named):
            self.pool.name(table.ids[index], table.epochs[index], names[index])

    # --- ending -----------------------------------------------------------------------------------------------------

    def free(self, request_id: str) -> None:
        """Returns all blocks of the request, the last one first: it is the least useful. None held is fine."""
        if request_id in self._tables:
            self.pool.free(reversed(self._tables.pop(request_id).ids))
        self.host_pool.free(self._host_tables.pop(request_id, ()))
        self._names.pop(request_id, None)

    def can_swap_out(self, request: Request) -> bool:
        """Whether the host pool has room for all that the request has computed."""
        count = self.num_blocks_for(request.num_computed_tokens)
        return 0 < count <= self.host_pool.num_free_blocks

    def swap_out(self, request: Request) -> None:
        """Moves all that the request has computed to the host pool and returns its blocks."""
        table = self._tables.pop(request.request_id)
        num_tokens = request.num_computed_tokens
        host_table = BlockTable.of(self.host_pool, self.host_pool.allocate(self.num_blocks_for(num_tokens)))
        self._move(BlockMove.SWAP_OUT, table, host_table, 0, num_tokens)
        self._host_tables[request.request_id] = host_table
        self.pool.free(reversed(table.ids))

    def is_swapped(self, request_id: str) -> bool:
        return request_id in self._host_tables

    def lose_all(self) -> None:
        """The content of both memories is gone: nobody has a table, nothing is found by name, nothing is moved."""
        for request_id in [*self._tables, *self._host_tables]:
            self.free(request_id)
        self.pool.forget()
        self._moves.clear()

    def take_moves(self) -> list[Move]:
        """Those decided since the last call, in order."""
        moves, self._moves = self._moves, []
        return moves

    # --- integrity --------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is free or in exactly as many tables as its count says."""
        self.pool.check_integrity(block_id for table in self._tables.values() for block_id in table)
        self.host_pool.check_integrity(block_id for table in self._host_tables.values() for block_id in table)
        assert not self._tables.keys() & self._host_tables.keys(), "a request is in both memories"

    def check_writable(self, request_id: str, start: int, end: int) -> None:
        """Raises AssertionError unless the request alone has the blocks of its tokens [start, end)."""
        table = self._tables[request_id].ids
        blocks = table[start // self.block_size : self.num_blocks_for(end)]
        assert len(table) >= self.num_blocks_for(end), f"the table of {request_id} ends before token {end}"
        assert all(self.pool.ref_count(block_id) == 1 for block_id in blocks), f"{request_id} would write shared blocks"

    # --- inside -----------------------------------------------------------------------------------------------------

    def _shared_blocks(self, request: Request, parent: Request | None) -> BlockTable:
        """Full blocks at the request's beginning that somebody has computed before; never its newest token's.

        Each as it is where it was found: in the parent's table, or by its name in the pool.
        """
        found: list[int] = []
        if self._prefix_caching:
            for name in self._block_names(request, (request.num_tokens_known - 1) // self.block_size):
                block_id = self.pool.find(name)
                if block_id is None:
                    break
                found.append(block_id)
        if parent is not None:
            common = self._num_common_tokens(request, parent) // self.block_size
            if common >= len(found):
                return self._tables[parent.request_id].beginning(common)
        return BlockTable.of(self.pool, found)

    def _num_common_tokens(self, request: Request, parent: Request) -> int:
        """Tokens at the beginning of both that the parent has certainly computed."""
        most = min(request.num_tokens_known - 1, parent.num_confirmed_tokens)
        if request.known_token_ids(0, most) == parent.known_token_ids(0, most):
            return most
        pairs = zip(request.known_token_ids(0, most), parent.known_token_ids(0, most), strict=True)
        return next(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)

    def _block_names(self, request: Request, count: int) -> list[bytes]:
        """Names of the request's first `count` blocks, which are full and known."""
        names = self._names.setdefault(request.request_id, [])
        while len(names) < count:
            previous = names[-1] if names else namespace_hash(request.cache_namespace)
            start = len(names) * self.block_size
            names.append(block_hash(previous, request.known_token_ids(start, start + self.block_size)))
        return names[:count]

    def _move(self, kind: BlockMove, source: BlockTable, target: BlockTable, start: int, end: int) -> None:
        """Tokens [start, end) go from one table to the same place of another; a block begins at `start`."""
        for index in range(start // self.block_size, self.num_blocks_for(end)):
            blocks = source.ids[index], target.ids[index], source.epochs[index], target.epochs[index]
            self._moves.append(Move(int(kind), *blocks, min(end - index * self.block_size, self.block_size)))

    def _missing(self, request_id: str, num_tokens: int) -> int:
        return self.num_blocks_for(num_tokens) - len(self._tables[request_id])
