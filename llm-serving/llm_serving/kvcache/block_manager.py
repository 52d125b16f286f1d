"""The block table of every request: what it shares, what it owns, and where it waits when it has no room."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

from llm_serving.core.kv_transfer import Transfer
from llm_serving.core.request import Request
from llm_serving.core.step import NO_BLOCK, BlockMove, BlockMoveKind
from llm_serving.core.window import Window
from llm_serving.kvcache.block_pool import BlockPool
from llm_serving.kvcache.block_table import BlockTable, block_hash, namespace_hash
from llm_serving.kvcache.transfer_pool import TransferBlock, TransferPool


class BlockManager:
    """Gives each request the blocks its tokens need and takes them back.

    The table of a request lists its blocks in order: token i lives in block `table[i // block_size]` at offset
    `i % block_size`. A table only grows, until the request gives it up. Where every layer of the model has a window, a
    request gives back what lies behind it, at the beginning of its table, and takes as much at the end: it never holds
    more than the window and a step.

    Only full blocks are shared: with earlier requests of the same namespace that began with the same tokens (found by
    name), and with the request it was forked from. A block that is shared is never written again; where a fork begins
    inside a block, it gets a copy of it. Of a beginning that is shared only what the token behind it sees is needed.

    Moves of whole blocks are collected in the order in which they were decided; a step takes them and does them before
    it computes, so whatever was submitted before still finds the old content.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_swap_blocks: int = 0,
        prefix_caching: bool = True,
        window: Window | None = None,
        exports: TransferPool | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_swap_blocks)
        """Blocks in host memory, where swapped requests wait."""
        self.transfer_pool = TransferPool() if exports is None else exports
        """Blocks in which requests go to other replicas."""
        self.block_size = block_size
        self.window = Window() if window is None else window
        self.max_blocks_per_request = self.window.max_blocks(block_size, num_blocks)
        """That a request holds at once."""
        self.prefix_caching = prefix_caching
        """Whether requests find blocks that others have computed."""
        self._unshared: set[str] = set()
        """Requests that share no block, see `admit`."""
        self._tables: dict[str, BlockTable] = {}
        self._host_tables: dict[str, BlockTable] = {}
        self._import_tables: dict[str, BlockTable] = {}
        """Blocks of transfer pools, of requests that wait with what other replicas have computed of them."""
        self._released_imports: list[TransferBlock] = []
        """Blocks of transfer pools that nobody here needs once the steps that have been formed are done."""
        self._block_hashes: dict[str, list[bytes]] = {}
        """Names of the first full blocks of each request, as far as they were asked for."""
        self._block_moves: list[BlockMove] = []

    # --- how much there is ------------------------------------------------------------------------------------------

    @property
    def usage(self) -> float:
        """Used share of the blocks, 0.0 to 1.0."""
        return self.pool.num_used_blocks / self.pool.num_blocks

    @property
    def num_kv_slots(self) -> int:
        """Tokens that the whole cache can hold."""
        return self.pool.num_blocks * self.block_size

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the longest request that an empty cache has room for."""
        return self.window.max_request_tokens(self.block_size, self.pool.num_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens lie in."""
        return -(-num_tokens // self.block_size)

    def max_blocks_of(self, num_tokens: int) -> int:
        """Most blocks that a request of so many tokens ever holds at once."""
        return min(self.num_blocks_for(num_tokens), self.max_blocks_per_request)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether an empty cache has room for a request of this many tokens."""
        return num_tokens <= self.max_request_tokens

    def num_blocks_held(self, request_id: str) -> int:
        return len(self._tables.get(request_id, ()))

    def num_blocks_shared(self, request_id: str) -> int:
        """Blocks at the beginning of the request's table that others hold as well, up to the first that none does."""
        count, ref_count = 0, self.pool.ref_count
        for block_id in self._tables.get(request_id, ()):
            if ref_count(block_id) == 1:
                break
            count += 1
        return count

    def num_tokens_with_blocks(self, request_id: str) -> int:
        """Tokens from the request's first on that have a place in its table, or had one."""
        return self._tables[request_id].end * self.block_size

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
        """Block ids in token order, of those it holds; none for a request without blocks."""
        return list(self._tables.get(request_id, ()))

    # --- beginning --------------------------------------------------------------------------------------------------

    def num_blocks_to_admit(
        self,
        request: Request,
        num_tokens: int,
        parent: Request | None = None,
        without: Sequence[Request] = (),
        *,
        keeps: bool = False,
    ) -> int:
        """Free blocks that `admit` would take; shared blocks that others use count nothing.

        With `without`, blocks that must be free now for `admit` after these have given up their tables.
        """
        uses = Counter(block_id for other in without for block_id in self._tables.get(other.request_id, ()))
        num_released = sum(self.pool.ref_count(block_id) == count for block_id, count in uses.items())
        outside = self._host_tables.get(request.request_id) or self._import_tables.get(request.request_id)
        if outside is not None:
            start = outside.start
            return self._table_end(start, num_tokens) - start - num_released
        shared = self._shared_blocks(
            request, None if parent in without else parent, self._recycles_blocks(num_tokens, keeps)
        )
        num_in_use = sum(self.pool.ref_count(block_id) > uses[block_id] for block_id in shared)
        return self._table_end(shared.start, num_tokens) - shared.start - num_released - num_in_use

    def admit(self, request: Request, num_tokens: int, parent: Request | None = None, *, keeps: bool = False) -> int:
        """Gives a request without a table one for `num_tokens`; the caller has asked `num_blocks_to_admit` before.

        With `parent`, a request that runs, what both have in common and the parent has computed is taken from it.

        With `keeps`, the request never lacks a block again until it has `num_tokens`. If it gives some back for that,
        it shares none: what others hold as well would not become free.

        Returns:
            How many of its tokens are in those blocks already; at most `Request.max_tokens_taken`.
        """
        request_id = request.request_id
        assert request_id not in self._tables, f"request {request_id} has blocks already"
        alone = self._recycles_blocks(num_tokens, keeps)
        if alone:
            self._unshared.add(request_id)
        if self.is_swapped(request_id) or request_id in self._import_tables:
            self._load_swapped_or_imported(request, num_tokens)
            return request.num_computed_tokens
        table = self._shared_blocks(request, parent, alone)
        end = table.end
        self.pool.add_references(table)
        table.extend(self.pool.allocate(self._table_end(table.start, num_tokens) - end), self.pool)
        self._tables[request_id] = table
        num_shared = end * self.block_size
        if parent is None or alone:
            return num_shared
        source, common = self._tables[parent.request_id], self._num_tokens_shared_with(request, parent)
        if not source.start <= common // self.block_size <= end:
            return num_shared
        self._move(BlockMoveKind.COPY, source, table, num_shared, common)
        return max(num_shared, common)

    def num_prefix_hit_tokens(self, request: Request) -> int:
        """Tokens of a request without blocks that `admit` would find by name."""
        return self._shared_blocks(request, None, alone=False).end * self.block_size

    def num_common_tokens(self, request: Request, other: Request) -> int:
        """Tokens at the beginning of a request that it will find by name when `other` has computed them."""
        if not self.prefix_caching:
            return 0
        ours, theirs = (
            self._hashes_of(each, each.max_prefix_hit_tokens // self.block_size) for each in (request, other)
        )
        differs = (index for index, (our, their) in enumerate(zip(ours, theirs, strict=False)) if our != their)
        return next(differs, min(len(ours), len(theirs))) * self.block_size

    def free_outside_window(self, request_id: str, num_computed: int) -> None:
        """Gives back what no token behind the first `num_computed` sees; every step of these has been submitted."""
        table = self._tables[request_id]
        self.pool.free(table.drop_before(min(self.window.first_block(num_computed, self.block_size), table.end)))

    def can_grow(self, request_id: str, num_tokens: int) -> bool:
        """Whether the request's table can be made to hold `num_tokens`."""
        return self._num_missing_blocks(request_id, num_tokens) <= self.pool.num_free_blocks

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Makes the request's table hold `num_tokens`; the caller has asked `can_grow` before."""
        missing = self._num_missing_blocks(request_id, num_tokens)
        if missing > 0:
            self._tables[request_id].extend(self.pool.allocate(missing), self.pool)

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Lets others find the full blocks among the first `num_tokens`, which have been computed and are known."""
        if not self.prefix_caching or request.request_id in self._unshared:
            return
        table = self._tables[request.request_id]
        num_named = min(num_tokens, request.num_tokens_known) // self.block_size
        names = self._hashes_of(request, num_named)
        for index in range(max(table.start, request.num_confirmed_tokens // self.block_size), num_named):
            self.pool.register_hash(table.ids[index], table.epochs[index], names[index])

    # --- ending -----------------------------------------------------------------------------------------------------

    def free(self, request_id: str) -> None:
        """Returns all blocks of the request, the last one first: it is the least useful. None held is fine."""
        if request_id in self._tables:
            self.pool.free(reversed(list(self._tables.pop(request_id))))
        self.host_pool.free(self._host_tables.pop(request_id, ()))
        self._release_import(self._import_tables.pop(request_id, BlockTable()))
        self._block_hashes.pop(request_id, None)
        self._unshared.discard(request_id)

    def num_blocks_to_swap(self, request: Request) -> int:
        """Blocks that hold what the request has computed and will be seen again."""
        table, num_tokens = self._tables[request.request_id], request.num_computed_tokens
        start = max(table.start, self.window.first_block(num_tokens, self.block_size))
        return max(0, self.num_blocks_for(num_tokens) - start)

    def can_swap_out(self, request: Request) -> bool:
        """Whether the host pool has room for all that the request has computed and needs."""
        return 0 < self.num_blocks_to_swap(request) <= self.host_pool.num_free_blocks

    def swap_out(self, request: Request) -> None:
        """Moves all that the request has computed and needs to the host pool and returns its blocks."""
        num_tokens, count = request.num_computed_tokens, self.num_blocks_to_swap(request)
        table = self._tables.pop(request.request_id)
        start = self.num_blocks_for(num_tokens) - count
        host_table = BlockTable.of(self.host_pool, self.host_pool.allocate(count), start)
        self._move(BlockMoveKind.SWAP_OUT, table, host_table, start * self.block_size, num_tokens)
        self._host_tables[request.request_id] = host_table
        self.pool.free(reversed(list(table)))
        self._unshared.discard(request.request_id)

    def is_swapped(self, request_id: str) -> bool:
        return request_id in self._host_tables

    # --- from and to other replicas ---------------------------------------------------------------------------------

    def add_import(self, request_id: str, transfer: Transfer) -> None:
        """A request has come with blocks of a transfer pool; `admit` will take what they hold."""
        if transfer.block_ids:
            self._import_tables[request_id] = BlockTable(transfer.block_ids, transfer.epochs, transfer.start)

    def export(self, request_id: str, num_tokens: int) -> list[BlockMove] | None:
        """Copies the blocks that a request needs of its first tokens, once they are computed; None: there is no room.

        Returns:
            Moves for the step that computes the last of these tokens.
        """
        table = self._tables[request_id]
        start = max(table.start, self.window.first_block(num_tokens, self.block_size))
        end = self.num_blocks_for(num_tokens)
        target = self.transfer_pool.allocate(request_id, start, end, num_tokens)
        return None if target is None else self._moves_of(BlockMoveKind.EXPORT, table, target, start, end, num_tokens)

    def pop_released_imports(self) -> list[TransferBlock]:
        """Blocks of transfer pools that are free once the steps formed so far are done, since the last call."""
        spent, self._released_imports = self._released_imports, []
        return spent

    def reset(self) -> None:
        """The content of both memories is gone: nobody has a table, nothing is found by name, nothing is moved.

        What other replicas have been handed is in neither. What they have handed over is not either, but may be what
        cannot be read, for each request that waits with some: it is not needed any more, as with those that ran.
        """
        for request_id in [*self._tables, *self._host_tables, *self._import_tables]:
            self.free(request_id)
        self.pool.clear_hashes()
        self._block_moves.clear()
        self.transfer_pool.cancel_all()

    def pop_block_moves(self) -> list[BlockMove]:
        """Those decided since the last call, in order."""
        moves, self._block_moves = self._block_moves, []
        return moves

    # --- integrity --------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is free or in exactly as many tables as its count says."""
        self.pool.check_integrity(chain.from_iterable(self._tables.values()))
        self.host_pool.check_integrity(chain.from_iterable(self._host_tables.values()))
        assert not self._tables.keys() & self._host_tables.keys(), "a request is in both memories"
        assert not self._tables.keys() & self._import_tables.keys(), "a request has blocks and is still to come"
        self.transfer_pool.check_integrity()
        most_held = max(map(len, self._tables.values()), default=0)
        assert most_held <= self.max_blocks_per_request, "a request holds more than the window and a step"
        shared = {self.pool.ref_count(each) for name in self._unshared for each in self._tables[name]}
        assert shared <= {1}, "a request that keeps its blocks shares some"

    def check_writable(self, request_id: str, start: int, end: int) -> None:
        """Raises AssertionError unless the request alone has the blocks of its tokens [start, end)."""
        table = self._tables[request_id].ids
        blocks = table[start // self.block_size : self.num_blocks_for(end)]
        assert len(table) >= self.num_blocks_for(end), f"the table of {request_id} ends before token {end}"
        assert all(self.pool.ref_count(block_id) == 1 for block_id in blocks), f"{request_id} would write shared blocks"

    def check_readable(self, request_id: str, num_computed: int) -> None:
        """Raises AssertionError unless the request has what the token behind `num_computed` others sees."""
        table, first = self._tables[request_id], self.window.first_block(num_computed, self.block_size)
        assert table.start <= first, f"the table of {request_id} begins at block {table.start}, it sees block {first}"

    # --- inside -----------------------------------------------------------------------------------------------------

    def _recycles_blocks(self, num_tokens: int, keeps: bool) -> bool:
        """Whether a request of so many tokens takes no block for them but by giving one back."""
        return keeps and self.num_blocks_for(num_tokens) > self.max_blocks_per_request

    def _table_end(self, start: int, num_tokens: int) -> int:
        """Entries of a table that begins at `start`, for a request of so many tokens."""
        return min(self.num_blocks_for(num_tokens), start + self.max_blocks_per_request)

    def _shared_blocks(self, request: Request, parent: Request | None, alone: bool) -> BlockTable:
        """Of the longest beginning that somebody has computed before, full blocks that what follows it sees.

        No more than the request may take; each as it is where it was found: in the parent's table, or by its name in
        the pool.
        """
        if alone:
            return BlockTable()
        source, num_common, names = BlockTable(), 0, list[bytes]()
        if parent is not None and parent.request_id not in self._unshared:
            source = self._tables[parent.request_id]
            num_common = self._num_tokens_shared_with(request, parent) // self.block_size
        if self.prefix_caching:
            names = self._hashes_of(request, request.max_prefix_hit_tokens // self.block_size)
        ids, epochs = array("i"), array("i")
        block_size, first_block = self.block_size, self.window.first_block
        count = max(num_common, len(names))
        never_missing = first_block(count * block_size, block_size)
        best, missing = 0, -1
        for index in range(count):
            if source.start <= index < num_common:
                block_id, epoch = source.ids[index], source.epochs[index]
            else:
                found = self.pool.find_cached(names[index]) if names else None
                if found is None:
                    missing = index
                    if index >= never_missing:
                        break
                    block_id, epoch = NO_BLOCK, 0
                else:
                    block_id, epoch = found, self.pool.epoch(found)
            ids.append(block_id)
            epochs.append(epoch)
            if missing < 0 or missing < first_block((index + 1) * block_size, block_size):
                best = index + 1
        start = first_block(best * block_size, block_size)
        return BlockTable(ids[start:best], epochs[start:best], start)

    def _num_tokens_shared_with(self, request: Request, parent: Request) -> int:
        """Tokens at the beginning of both that the request may take, as the parent has certainly computed them."""
        most = min(request.max_prefix_hit_tokens, parent.num_confirmed_tokens)
        if request.known_token_ids(0, most) == parent.known_token_ids(0, most):
            return most
        pairs = zip(request.known_token_ids(0, most), parent.known_token_ids(0, most), strict=True)
        return next(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)

    def _hashes_of(self, request: Request, count: int) -> list[bytes]:
        """Names of the request's first `count` blocks, which are full and known."""
        names = self._block_hashes.setdefault(request.request_id, [])
        while len(names) < count:
            previous = names[-1] if names else namespace_hash(request.cache_namespace)
            start = len(names) * self.block_size
            names.append(block_hash(previous, request.known_token_ids(start, start + self.block_size)))
        return names[:count]

    def _load_swapped_or_imported(self, request: Request, num_tokens: int) -> None:
        """Gives a request whose tokens are outside of the cache a table, and moves them into it."""
        request_id = request.request_id
        kind, outside = BlockMoveKind.SWAP_IN, self._host_tables.pop(request_id, None)
        if outside is None:
            kind, outside = BlockMoveKind.IMPORT, self._import_tables.pop(request_id)
        start = outside.start
        table = BlockTable.of(self.pool, self.pool.allocate(self._table_end(start, num_tokens) - start), start)
        self._move(kind, outside, table, start * self.block_size, request.num_computed_tokens)
        if kind is BlockMoveKind.SWAP_IN:
            self.host_pool.free(outside)
        else:
            self._release_import(outside)
        self._tables[request_id] = table

    def _release_import(self, table: BlockTable) -> None:
        self._released_imports += zip(table.ids[table.start :], table.epochs[table.start :], strict=True)

    def _move(self, kind: BlockMoveKind, source: BlockTable, target: BlockTable, start: int, end: int) -> None:
        """Tokens [start, end) go from one table to the same place of another; a block begins at `start`."""
        self._block_moves += self._moves_of(
            kind, source, target, start // self.block_size, self.num_blocks_for(end), end
        )

    def _moves_of(
        self, kind: BlockMoveKind, source: BlockTable, target: BlockTable, start: int, end: int, num_tokens: int
    ) -> list[BlockMove]:
        """Blocks [start, end) of one table go to the same place of another; `num_tokens` of the first ones count."""
        moves = []
        for index in range(start, end):
            blocks = source.ids[index], target.ids[index], source.epochs[index], target.epochs[index]
            moves.append(BlockMove(int(kind), *blocks, min(num_tokens - index * self.block_size, self.block_size)))
        return moves

    def _num_missing_blocks(self, request_id: str, num_tokens: int) -> int:
        table = self._tables[request_id]
        return self._table_end(table.start, num_tokens) - table.end
