"""The KV cache of a replica: block tables, prefix sharing, sliding windows, swapping and KV transfer."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

from llm_serving.core.foreign_blocks import Transfer
from llm_serving.core.request import Request
from llm_serving.core.request_class import cache_namespace
from llm_serving.core.step import NO_BLOCK, BlockMove, BlockMoveKind
from llm_serving.core.window import NO_WINDOW, Window
from llm_serving.kvcache.adapter_slots import AdapterSlots
from llm_serving.kvcache.block_pool import BlockPool
from llm_serving.kvcache.block_table import BlockTable, block_hash, namespace_hash
from llm_serving.kvcache.disk_prefixes import DiskPrefixes
from llm_serving.kvcache.state_slots import StateSlots
from llm_serving.kvcache.transfer_pool import TransferBlock, TransferPool


class BlockManager:
    """Allocates and frees the blocks for the tokens of each request.

    Token i of a request is in block `table[i // block_size]` at offset `i % block_size`. If every layer has a sliding
    window, a request frees the blocks that the window has passed, so it holds blocks for at most the window and one
    step. Only full blocks are shared: with earlier requests of the same namespace and prefix (found by hash), and with
    the parent of a fork. A shared block is never written again; a fork that starts inside a block gets a copy of it.
    Before a step computes, the WorkAgent executes the step's block moves in the order in which this class returned
    them.

    In a model with recurrent states (fixed size per request), a request with blocks also has a slot of `states`. A
    shared prefix then ends at a checkpoint of the state, and a fork computes the tokens after the checkpoint again.
    """

    states: StateSlots | None = None
    """Slots of recurrent states. None: the model has none, or the scheduler was restored from a recording without
    them.
    """
    disk: DiskPrefixes | None = None
    """Disk cache of prefixes; None: there is none."""

    adapters: AdapterSlots | None = None
    """Slots of LoRA adapters; None: the model serves no adapters."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_swap_blocks: int = 0,
        prefix_caching: bool = True,
        window: Window | None = None,
        exports: TransferPool | None = None,
        states: StateSlots | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_swap_blocks)
        self.transfer_pool = TransferPool() if exports is None else exports
        self.states = states
        self.adapters = adapters
        self.block_size = block_size
        self.window = Window() if window is None else window
        self.max_blocks_per_request = self.window.max_blocks(block_size, num_blocks)
        self.max_request_tokens = self.window.max_request_tokens(block_size, num_blocks)
        """Number of tokens of the longest request that fits into an empty cache."""
        self.prefix_caching = prefix_caching
        self._unshared: set[str] = set()
        """Ids of requests that share no blocks (`guaranteed` requests with a sliding window, see `admit`)."""
        self._tables: dict[str, BlockTable] = {}
        self._host_tables: dict[str, BlockTable] = {}
        self._import_tables: dict[str, BlockTable] = {}
        """Id of a waiting request -> its blocks in the transfer pools of other replicas."""
        self._released_imports: list[TransferBlock] = []
        """Blocks of other replicas' transfer pools that no step after those formed so far reads."""
        self._block_hashes: dict[str, list[bytes]] = {}
        """Request id -> hashes of its first full blocks, computed on demand."""
        self._block_moves: list[BlockMove] = []

    # --- capacity ---------------------------------------------------------------------------------------------------

    @property
    def has_sliding_window(self) -> bool:
        """Whether requests free the blocks that the sliding window has passed, which limits the blocks of each
        request.
        """
        return self.max_blocks_per_request < NO_WINDOW

    @property
    def num_kv_slots(self) -> int:
        return self.pool.num_blocks * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def max_blocks_of(self, num_tokens: int) -> int:
        """Return the maximum number of blocks that a request of `num_tokens` holds at the same time."""
        return min(self.num_blocks_for(num_tokens), self.max_blocks_per_request)

    def num_blocks_held(self, request_id: str) -> int:
        return len(self._tables.get(request_id, ()))

    def num_blocks_shared(self, request_id: str) -> int:
        """Return how many blocks at the start of the request's table are shared with other requests."""
        count, ref_count = 0, self.pool.ref_count
        for block_id in self._tables.get(request_id, ()):
            if ref_count(block_id) == 1:
                break
            count += 1
        return count

    def num_tokens_with_blocks(self, request_id: str) -> int:
        """Return the number of tokens from the start of the request that have a block, or had one before the window
        passed it.
        """
        return self._tables[request_id].end * self.block_size

    @property
    def num_swapped_requests(self) -> int:
        return len(self._host_tables)

    @property
    def tables(self) -> Mapping[str, BlockTable]:
        return self._tables

    def table(self, request_id: str) -> BlockTable:
        """Return the table of a request that has blocks. The caller must not change or keep it."""
        return self._tables[request_id]

    def block_table(self, request_id: str) -> list[int]:
        return list(self._tables.get(request_id, ()))

    # --- allocation -------------------------------------------------------------------------------------------------

    def num_blocks_to_admit(
        self,
        request: Request,
        num_tokens: int,
        parent: Request | None = None,
        without: Sequence[Request] = (),
        *,
        guaranteed: bool = False,
    ) -> int:
        """Return the number of free blocks that `admit` needs if the tables of the requests `without` are freed
        before.
        """
        uses: Counter[int] = Counter()
        num_free = 0
        for other in without:
            uses.update(self._tables.get(other.request_id, ()))
        for block_id, count in uses.items():
            num_free += self.pool.ref_count(block_id) == count
        outside = self._host_tables.get(request.request_id) or self._import_tables.get(request.request_id)
        if outside is not None:
            start = outside.start
            return self._table_end(start, num_tokens) - start - num_free
        if parent in without:
            parent = None
        shared = self._shared_blocks(request, parent, guaranteed and self._recycles_blocks(num_tokens))
        for block_id in shared:
            num_free += self.pool.ref_count(block_id) > uses[block_id]
        return self._table_end(shared.start, num_tokens) - shared.start - num_free

    def admit(
        self, request: Request, num_tokens: int, parent: Request | None = None, *, guaranteed: bool = False
    ) -> int:
        """Allocate the table of a request that has none. The caller must have checked `num_blocks_to_admit`.

        Return the number of its tokens that are already computed, at most `Request.max_prefix_hit_tokens`. `parent`: a
        running request whose computed prefix is shared. A `guaranteed` request never lacks a block up to `num_tokens`
        tokens. With a sliding window, a guaranteed request reuses the blocks that its window passes. So it shares no
        blocks, because a shared block would not become free.
        """
        request_id = request.request_id
        assert request_id not in self._tables, f"request {request_id} has blocks already"
        unshared = guaranteed and self._recycles_blocks(num_tokens)
        if unshared:
            self._unshared.add(request_id)
        if request_id in self._host_tables or request_id in self._import_tables:
            self._load_swapped_or_imported(request, num_tokens)
            return request.num_computed_tokens
        table = self._shared_blocks(request, parent, unshared)
        end = len(table.ids)
        if self.states is not None:
            hashes = self._hashes_of(request, request.max_prefix_hit_tokens // self.block_size)
            is_shared = self.prefix_caching and not unshared
            self.states.admit(request, hashes if is_shared else None, end, self.pool.is_cached)
        if end:
            self.pool.add_references(table)
        table.extend(self.pool.allocate(self._table_end(table.start, num_tokens) - end), self.pool)
        self._tables[request_id] = table
        num_shared = end * self.block_size
        if parent is None or unshared or self.states is not None:
            return num_shared
        source, common = self._tables[parent.request_id], self._num_tokens_shared_with(request, parent)
        if not source.start <= common // self.block_size <= end:
            return num_shared
        self._move(BlockMoveKind.COPY, source, table, num_shared, common)
        return max(num_shared, common)

    def num_prefix_hit_tokens(self, request: Request) -> int:
        """Return the number of tokens that `admit` would find in the prefix cache."""
        return self._shared_blocks(request, None, unshared=False).end * self.block_size

    def num_common_tokens(self, request: Request, other: Request) -> int:
        """Return the number of prefix tokens that `request` will find in the cache after `other` has computed its
        prompt.
        """
        if not self.prefix_caching:
            return 0
        ours, theirs = (
            self._hashes_of(each, each.max_prefix_hit_tokens // self.block_size) for each in (request, other)
        )
        differs = (index for index, (our, their) in enumerate(zip(ours, theirs, strict=False)) if our != their)
        num_tokens = next(differs, min(len(ours), len(theirs))) * self.block_size
        return num_tokens if self.states is None else self.states.num_common_tokens(other, num_tokens)

    def free_outside_window(self, request_id: str, num_computed: int) -> None:
        """Free the blocks that no token after the first `num_computed` attends to. The steps that compute these tokens
        must have been submitted.
        """
        table = self._tables[request_id]
        self.pool.free(table.drop_before(min(self.window.first_block(num_computed, self.block_size), table.end)))

    def can_grow(self, request_id: str, num_tokens: int) -> bool:
        return self._num_missing_blocks(request_id, num_tokens) <= self.pool.num_free_blocks

    def grow(self, request_id: str, num_tokens: int) -> None:
        """Extend the request's table to `num_tokens` tokens. The caller must have checked `can_grow`."""
        missing = self._num_missing_blocks(request_id, num_tokens)
        if missing > 0:
            self._tables[request_id].extend(self.pool.allocate(missing), self.pool)

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Let other requests share the full blocks of the first `num_tokens` tokens, which are computed and known to
        the master.
        """
        if not self.prefix_caching or request.request_id in self._unshared:
            return
        table = self._tables[request.request_id]
        num_full = min(num_tokens, request.num_tokens_known) // self.block_size
        hashes = self._hashes_of(request, num_full)
        for index in range(max(table.start, request.num_confirmed_tokens // self.block_size), num_full):
            self.pool.register_hash(table.ids[index], table.epochs[index], hashes[index])
        if self.states is not None:
            self.states.confirm(request.request_id, hashes)

    # --- freeing and swapping ---------------------------------------------------------------------------------------

    def free(self, request_id: str) -> None:
        """Free all blocks of a request, if any. The last block is freed first, because it is the least likely to be
        reused.
        """
        if request_id in self._tables:
            table = self._tables.pop(request_id)
            self.pool.free(reversed(table.ids[table.start :]))
        if request_id in self._host_tables:
            self.host_pool.free(self._host_tables.pop(request_id))
        if request_id in self._import_tables:
            self._release_import(self._import_tables.pop(request_id))
        if self.states is not None:
            self.states.free(request_id)
        if self.disk is not None:
            self.disk.free(request_id)
        self._block_hashes.pop(request_id, None)
        self._unshared.discard(request_id)

    def num_blocks_to_swap(self, request: Request) -> int:
        """Return the number of computed blocks to which later tokens of the request attend."""
        table, num_tokens = self._tables[request.request_id], request.num_computed_tokens
        start = max(table.start, self.window.first_block(num_tokens, self.block_size))
        return max(0, self.num_blocks_for(num_tokens) - start)

    def can_swap_out(self, request: Request) -> bool:
        has_slot = self.states is None or self.states.can_swap_out
        return has_slot and 0 < self.num_blocks_to_swap(request) <= self.host_pool.num_free_blocks

    def swap_out(self, request: Request) -> None:
        """Move the computed blocks that later tokens attend to into the host pool, and free the request's table."""
        num_tokens, count = request.num_computed_tokens, self.num_blocks_to_swap(request)
        table = self._tables.pop(request.request_id)
        start = self.num_blocks_for(num_tokens) - count
        host_table = BlockTable.of(self.host_pool, self.host_pool.allocate(count), start)
        self._move(BlockMoveKind.SWAP_OUT, table, host_table, start * self.block_size, num_tokens)
        self._host_tables[request.request_id] = host_table
        self.pool.free(reversed(list(table)))
        self._unshared.discard(request.request_id)
        if self.states is not None:
            self.states.swap_out(request.request_id)

    def is_swapped(self, request_id: str) -> bool:
        return request_id in self._host_tables

    # --- KV transfer between replicas -------------------------------------------------------------------------------

    def add_import(self, request_id: str, transfer: Transfer) -> None:
        """Record the transfer pool blocks of a request that migrates from another replica. `admit` imports them."""
        if transfer.block_ids:
            self._import_tables[request_id] = BlockTable(transfer.block_ids, transfer.epochs, transfer.start)

    def export(self, request_id: str, num_tokens: int) -> list[BlockMove] | None:
        """Export the blocks of the first `num_tokens` tokens to which later tokens attend into the transfer pool.

        Return the moves for the step that computes the last of these tokens; None if the transfer pool is full. If the
        model has recurrent states, moves of the request's state follow those of the blocks.
        """
        table = self._tables[request_id]
        start = max(table.start, self.window.first_block(num_tokens, self.block_size))
        end = self.num_blocks_for(num_tokens)
        num_pieces = 0 if self.states is None else self.states.num_pieces
        target = self.transfer_pool.allocate(request_id, start, end + num_pieces, num_tokens)
        if target is None:
            return None
        moves = self._moves_of(BlockMoveKind.EXPORT, table, target, start, end, num_tokens)
        if self.states is not None:
            moves += self.states.export(request_id, target.blocks(end), num_tokens)
        return moves

    def prompt_hashes(self, request: Request) -> list[bytes]:
        """Return the hashes of the full blocks of a request's prompt."""
        return self._hashes_of(request, request.num_prompt_tokens // self.block_size)

    def import_from_disk(self, request: Request, num_shared: int) -> int:
        """Import the blocks read from disk for a request that has just been admitted with `num_shared` computed tokens.
        Return the number of computed tokens that it has now.
        """
        assert self.disk is not None
        table, hashes = self._tables[request.request_id], self.prompt_hashes(request)
        moves = self.disk.imports(request.request_id, table, num_shared // self.block_size, hashes, self.pool)
        self._block_moves += moves
        return num_shared + len(moves) * self.block_size

    def pop_released_imports(self) -> list[TransferBlock]:
        """Return the blocks imported since the last call. Their owner can reclaim them after the steps formed so
        far.
        """
        if not self._released_imports:
            return []
        released, self._released_imports = self._released_imports, []
        return released

    def reset(self) -> None:
        """Drop all tables, hashes and pending moves after a loss of the cache and the host pool.

        Blocks handed over to other replicas stay valid. Imports are dropped, because reading them may have caused the
        loss.
        """
        for request_id in [*self._tables, *self._host_tables, *self._import_tables]:
            self.free(request_id)
        self.pool.clear_hashes()
        self._block_moves.clear()
        self.transfer_pool.cancel_all()
        if self.states is not None:
            self.states.reset()
        if self.disk is not None:
            self.disk.reset()

    def pop_block_moves(self) -> list[BlockMove]:
        """Return the block moves since the last call, in the order of execution."""
        moves, self._block_moves = self._block_moves, []
        return moves

    # --- integrity --------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        self.pool.check_integrity(chain.from_iterable(self._tables.values()))
        self.host_pool.check_integrity(chain.from_iterable(self._host_tables.values()))
        assert not self._tables.keys() & self._host_tables.keys(), "a request is both swapped and in the cache"
        assert not self._tables.keys() & self._import_tables.keys(), "a request is both to be imported and in the cache"
        self.transfer_pool.check_integrity()
        most_held = max(map(len, self._tables.values()), default=0)
        assert most_held <= self.max_blocks_per_request, "a request holds more than the window and a step"
        counts = {self.pool.ref_count(each) for request_id in self._unshared for each in self._tables[request_id]}
        assert counts <= {1}, "a request with guaranteed blocks shares some"
        if self.states is not None:
            self.states.check_integrity(self._tables, self._host_tables)
        if self.disk is not None:
            self.disk.exports.check_integrity()

    def check_writable(self, request_id: str, start: int, end: int) -> None:
        """Raise AssertionError if another request shares a block of the tokens [start, end)."""
        table = self._tables[request_id].ids
        blocks = table[start // self.block_size : self.num_blocks_for(end)]
        assert len(table) >= self.num_blocks_for(end), f"the table of {request_id} ends before token {end}"
        assert all(self.pool.ref_count(block_id) == 1 for block_id in blocks), f"{request_id} would write shared blocks"

    def check_readable(self, request_id: str, num_computed: int) -> None:
        """Raise AssertionError if the request lacks a block to which its token number `num_computed` attends."""
        table, first = self._tables[request_id], self.window.first_block(num_computed, self.block_size)
        assert table.start <= first, f"the table of {request_id} begins at block {table.start}, it sees block {first}"

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _recycles_blocks(self, num_tokens: int) -> bool:
        """Return whether a request of `num_tokens` with guaranteed blocks reuses blocks that its sliding window has
        passed.
        """
        return self.num_blocks_for(num_tokens) > self.max_blocks_per_request

    def _table_end(self, start: int, num_tokens: int) -> int:
        """Return the end of a table for a request of `num_tokens`, whose first block is entry `start`."""
        return min(self.num_blocks_for(num_tokens), start + self.max_blocks_per_request)

    def _shared_blocks(self, request: Request, parent: Request | None, unshared: bool) -> BlockTable:
        """Return the full blocks of the longest computed prefix that the request can share, from its parent or found by
        hash.
        """
        if unshared:
            return BlockTable()
        source, num_common, hashes = BlockTable(), 0, list[bytes]()
        if parent is not None and parent.request_id not in self._unshared:
            source = self._tables[parent.request_id]
            num_common = self._num_tokens_shared_with(request, parent) // self.block_size
        if self.prefix_caching and (num_full := request.max_prefix_hit_tokens // self.block_size):
            hashes = self._hashes_of(request, num_full)
        count = max(num_common, len(hashes))
        if not count:
            return BlockTable()
        ids, epochs = array("i"), array("i")
        block_size, first_block = self.block_size, self.window.first_block
        never_missing = first_block(count * block_size, block_size)
        best, missing = 0, -1
        for index in range(count):
            if source.start <= index < num_common:
                block_id, epoch = source.ids[index], source.epochs[index]
            else:
                found = self.pool.find_cached(hashes[index]) if hashes else None
                if found is None:
                    missing = index
                    if index >= never_missing:
                        break
                    block_id, epoch = NO_BLOCK, 0
                else:
                    block_id, epoch = found, self.pool.epoch(found)
            ids.append(block_id)
            epochs.append(epoch)
            has_blocks = missing < 0 or missing < first_block((index + 1) * block_size, block_size)
            if has_blocks and (self.states is None or (hashes and self.states.is_checkpoint(hashes[index]))):
                best = index + 1
        start = first_block(best * block_size, block_size)
        return BlockTable(ids[start:best], epochs[start:best], start)

    def _num_tokens_shared_with(self, request: Request, parent: Request) -> int:
        """Return the number of tokens of the common prefix that the parent has computed and the request may share."""
        most = min(request.max_prefix_hit_tokens, parent.num_confirmed_tokens)
        if request.known_token_ids(0, most) == parent.known_token_ids(0, most):
            return most
        pairs = zip(request.known_token_ids(0, most), parent.known_token_ids(0, most), strict=True)
        return next(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)

    def _hashes_of(self, request: Request, count: int) -> list[bytes]:
        """Return the hashes of the request's first `count` blocks. All their tokens must be known."""
        hashes = self._block_hashes.setdefault(request.request_id, [])
        while len(hashes) < count:
            previous = (
                hashes[-1]
                if hashes
                else namespace_hash(cache_namespace(request.tenant, request.cache_salt, request.adapter))
            )
            start = len(hashes) * self.block_size
            hashes.append(block_hash(previous, request.known_token_ids(start, start + self.block_size)))
        return hashes[:count]

    def _load_swapped_or_imported(self, request: Request, num_tokens: int) -> None:
        request_id = request.request_id
        kind, outside = BlockMoveKind.SWAP_IN, self._host_tables.pop(request_id, None)
        if outside is None:
            kind, outside = BlockMoveKind.IMPORT, self._import_tables.pop(request_id)
        start = outside.start
        table = BlockTable.of(self.pool, self.pool.allocate(self._table_end(start, num_tokens) - start), start)
        self._move(kind, outside, table, start * self.block_size, request.num_computed_tokens)
        if kind is BlockMoveKind.SWAP_IN:
            self.host_pool.free(outside)
            if self.states is not None:
                self.states.swap_in(request_id)
        else:
            self._release_import(outside)
            if self.states is not None:
                computed = request.num_computed_tokens
                pieces = outside.blocks(self.num_blocks_for(computed))
                self._block_moves += self.states.admit_import(request_id, pieces, computed)
        self._tables[request_id] = table

    def _release_import(self, table: BlockTable) -> None:
        self._released_imports += table.blocks(table.start)

    def _move(self, kind: BlockMoveKind, source: BlockTable, target: BlockTable, start: int, end: int) -> None:
        """Add moves of the tokens [start, end) between the same entries of two tables. `start`: first token of a
        block.
        """
        self._block_moves += self._moves_of(
            kind, source, target, start // self.block_size, self.num_blocks_for(end), end
        )

    def _moves_of(
        self, kind: BlockMoveKind, source: BlockTable, target: BlockTable, start: int, end: int, num_tokens: int
    ) -> list[BlockMove]:
        """Return the moves that copy the entries [start, end) of a table to another. Only the first `num_tokens` tokens
        count.
        """
        moves = []
        for index in range(start, end):
            blocks = source.ids[index], target.ids[index], source.epochs[index], target.epochs[index]
            moves.append(BlockMove(int(kind), *blocks, min(num_tokens - index * self.block_size, self.block_size)))
        return moves

    def _num_missing_blocks(self, request_id: str, num_tokens: int) -> int:
        table = self._tables[request_id]
        return self._table_end(table.start, num_tokens) - table.end
