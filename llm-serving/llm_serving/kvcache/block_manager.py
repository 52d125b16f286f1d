"""The KV cache of a replica: prefix sharing, sliding windows, swapping and KV transfer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, takewhile

from llm_serving.core.request import Request, Transfer
from llm_serving.core.request_class import cache_namespace
from llm_serving.core.step import BlockMove, BlockMoveKind
from llm_serving.core.window import ONE_GROUP, CacheGroups
from llm_serving.kvcache.adapter_slots import AdapterSlots
from llm_serving.kvcache.block_pool import BlockPool
from llm_serving.kvcache.block_table import (
    BlockTable,
    PrefixSearch,
    Tables,
    block_hash,
    block_moves,
    group_hash,
    kept_ends,
    namespace_hash,
)
from llm_serving.kvcache.state_slots import StateSlots
from llm_serving.kvcache.transfer_pool import DiskPrefixes, TransferBlock, TransferPool


class BlockManager:
    """Allocates and frees the blocks for the tokens of each request.

    A request has a table for each group of layers (`network.caches.CacheLayout`). Token i is in block `table[i //
    block_size]` at offset `i % block_size`.

    A request finds full blocks of earlier requests with the same namespace and prefix by hash. A fork (a beam, or one
    of `n` choices) shares full blocks of its parent. A shared block is never written; if a fork starts inside a block,
    it gets a copy. In a group of layers with a sliding window, a request frees the blocks that the window has passed.
    If the model has recurrent states, each request with blocks also has a state slot. A shared prefix then ends at a
    checkpoint, a block after which a state was stored, and a fork recomputes the tokens after it.
    """

    # Recordings of earlier versions lack these attributes.
    states: StateSlots | None = None
    disk: DiskPrefixes | None = None
    adapters: AdapterSlots | None = None

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        num_swap_blocks: int = 0,
        groups: CacheGroups = ONE_GROUP,
        exports: TransferPool | None = None,
        states: StateSlots | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.host_pool = BlockPool(num_swap_blocks)
        self.transfer_pool = TransferPool() if exports is None else exports
        self.states = states
        self.adapters = adapters
        self.prefix_caching = prefix_caching
        self.block_size = block_size
        self.groups = groups
        self.num_groups = len(self.groups.windows)
        self.has_sliding_window = self.groups.is_sliding
        self.max_blocks = self.groups.max_blocks(block_size, num_blocks)
        self.max_request_tokens = self.groups.max_request_tokens(block_size, num_blocks)
        self._unshared: set[str] = set()
        self.tables: dict[str, Tables] = {}
        self._host_tables: dict[str, Tables] = {}
        self._import_tables: dict[str, Tables] = {}
        self._released_imports: list[TransferBlock] = []
        """Blocks of other replicas' transfer pools. Their owners can reclaim them after the steps formed so far."""
        self._block_hashes: dict[str, list[bytes]] = {}
        self._kept_ends: dict[str, tuple[int, ...]] = {}
        self._block_moves: list[BlockMove] = []

    # --- queries ----------------------------------------------------------------------------------------------------

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_held(self, request_id: str) -> int:
        return sum(map(len, self.tables.get(request_id, ())))

    def max_blocks_of(self, num_tokens: int) -> int:
        return self.groups.max_blocks_of(num_tokens, self.block_size, self.pool.num_blocks)

    def num_blocks_shared(self, request_id: str) -> int:
        """Return the number of blocks at the start of the request's first table that other requests also use."""
        ref_count = self.pool.ref_count
        return sum(1 for _ in takewhile(lambda block_id: ref_count(block_id) > 1, self.block_table(request_id)))

    def num_tokens_with_blocks(self, request_id: str) -> int:
        return min([len(table.ids) for table in self.tables[request_id]]) * self.block_size

    @property
    def num_swapped_requests(self) -> int:
        return len(self._host_tables)

    def table(self, request_id: str) -> BlockTable:
        """Return the table of the first group. The caller must not change or keep it."""
        return self.tables[request_id][0]

    def block_table(self, request_id: str) -> list[int]:
        return list(self.tables[request_id][0]) if request_id in self.tables else []

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
        """Return how many free blocks `admit` (same arguments) needs after preempting the requests in `without`."""
        uses: Counter[int] = Counter()
        num_free = 0
        for other in without:
            uses.update(chain.from_iterable(self.tables.get(other.request_id, ())))
        for block_id, count in uses.items():
            num_free += self.pool.ref_count(block_id) == count
        tables = self._host_tables.get(request.request_id) or self._import_tables.get(request.request_id)
        if tables is None:
            if parent in without:
                parent = None
            tables = self._shared_blocks(request, parent, guaranteed and self._recycles_blocks(num_tokens))
            for block_id in chain.from_iterable(tables):
                num_free += self.pool.ref_count(block_id) > uses[block_id]
        num_entries = self.num_blocks_for(num_tokens)
        for table, most in zip(tables, self.max_blocks, strict=True):
            num_free -= min(num_entries - table.start, most)
        return -num_free

    def admit(
        self, request: Request, num_tokens: int, parent: Request | None = None, *, guaranteed: bool = False
    ) -> int:
        """Allocate the tables of a request. The caller must have checked `num_blocks_to_admit`.

        Return how many of its tokens are already computed. `parent`: a running request whose prefix is shared.
        `guaranteed`: the request must not be preempted, so it can always grow to `num_tokens` tokens. If it can grow
        only by reusing blocks that its sliding window has passed, it shares no blocks, as shared blocks stay in use.
        """
        request_id = request.request_id
        assert request_id not in self.tables, f"request {request_id} has blocks already"
        unshared = guaranteed and self._recycles_blocks(num_tokens)
        if unshared:
            self._unshared.add(request_id)
        if request_id in self._host_tables or request_id in self._import_tables:
            self._load_swapped_or_imported(request, num_tokens)
            return request.num_computed_tokens
        tables = self._shared_blocks(request, parent, unshared)
        end = len(tables[0].ids)
        hashes = None
        if self.prefix_caching and not unshared and (self.states is not None or self.num_groups > 1):
            hashes = self._shareable_hashes(request)
        if self.states is not None:
            self.states.admit(request, hashes, end, self.pool.is_cached)
        if end:
            self.pool.add_references(chain.from_iterable(tables))
        if self.num_groups > 1 and hashes is not None:
            num_prompt_blocks = request.num_prompt_tokens // self.block_size
            self._kept_ends[request_id] = kept_ends(hashes, self.pool, end, num_prompt_blocks)
        self._allocate(tables, num_tokens)
        self.tables[request_id] = tables
        num_shared = end * self.block_size
        if parent is None or unshared or self.states is not None:
            return num_shared
        sources, common = self.tables[parent.request_id], self._num_tokens_shared_with(request, parent)
        if not max([source.start for source in sources]) <= common // self.block_size <= end:
            return num_shared
        self._move(BlockMoveKind.COPY, sources, tables, end, common)
        return max(num_shared, common)

    def num_prefix_hit_tokens(self, request: Request) -> int:
        return self._shared_blocks(request, None, unshared=False)[0].end * self.block_size

    def num_common_tokens(self, request: Request, other: Request) -> int:
        """Return how many prefix tokens `request` will find in the cache once `other` has computed its prompt."""
        if not self.prefix_caching:
            return 0
        ours, theirs = self._shareable_hashes(request), self._shareable_hashes(other)
        differs = (index for index, (our, their) in enumerate(zip(ours, theirs, strict=False)) if our != their)
        num_tokens = next(differs, min(len(ours), len(theirs))) * self.block_size
        return num_tokens if self.states is None else self.states.num_common_tokens(other, num_tokens)

    def free_outside_window(self, request_id: str, num_computed: int) -> int:
        """Free the blocks to which no token after the first `num_computed` tokens attends. Return their number."""
        count = 0
        for window, table in zip(self.groups.windows, self.tables[request_id], strict=True):
            first = table.start
            passed = table.drop_before(min(window.first_block(num_computed, self.block_size), table.end))
            if not passed:
                continue
            count += len(passed)
            if self.num_groups == 1:
                self.pool.free(passed)
                continue
            ends = self._kept_ends.get(request_id, ())
            for index, block_id in enumerate(passed, first):
                is_kept = any(window.first_block(end * self.block_size, self.block_size) <= index < end for end in ends)
                self.pool.free((block_id,), early=not is_kept)
        return count

    def grow(self, request_id: str, num_tokens: int) -> int | None:
        """Allocate the blocks missing for `num_tokens` tokens. Return their number, or None if too few are free."""
        tables, num_entries, missing = self.tables[request_id], self.num_blocks_for(num_tokens), 0
        for table, most in zip(tables, self.max_blocks, strict=True):
            missing += max(0, min(num_entries, table.start + most) - len(table.ids))
        if missing > self.pool.num_free_blocks:
            return None
        if missing:
            self._allocate(tables, num_tokens)
        return missing

    def cache_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Let other requests share the full blocks of the first `num_tokens` tokens, which are computed and known."""
        if not self.prefix_caching or request.request_id in self._unshared:
            return
        num_full = min(num_tokens, request.num_tokens_known) // self.block_size
        hashes, first = self._hashes_of(request, num_full), request.num_confirmed_tokens // self.block_size
        for group, table in enumerate(self.tables[request.request_id]):
            for index in range(max(table.start, first), num_full):
                self.pool.register_hash(table.ids[index], table.epochs[index], group_hash(hashes[index], group))
        if self.states is not None:
            self.states.confirm(request.request_id, hashes)

    # --- freeing and swapping ---------------------------------------------------------------------------------------

    def free(self, request_id: str) -> None:
        """Free all blocks of a request, the last one first.

        The pool reallocates blocks in the order of their release, so the start of the prefix stays cached longest.
        """
        if request_id in self.tables:
            for table in reversed(self.tables.pop(request_id)):
                self.pool.free(reversed(table.ids[table.start :]))
        if request_id in self._host_tables:
            self.host_pool.free(chain.from_iterable(self._host_tables.pop(request_id)))
        if request_id in self._import_tables:
            self._release_import(self._import_tables.pop(request_id))
        if self.states is not None:
            self.states.free(request_id)
        if self.disk is not None:
            self.disk.free(request_id)
        self._block_hashes.pop(request_id, None)
        self._unshared.discard(request_id)
        if self.num_groups > 1:
            self._kept_ends.pop(request_id, None)

    def num_blocks_to_swap(self, request: Request) -> int:
        end = self.num_blocks_for(request.num_computed_tokens)
        starts = self._starts(request.request_id, request.num_computed_tokens)
        return sum(max(0, end - start) for start in starts)

    def can_swap_out(self, request: Request) -> bool:
        has_slot = self.states is None or self.states.can_swap_out
        return has_slot and 0 < self.num_blocks_to_swap(request) <= self.host_pool.num_free_blocks

    def swap_out(self, request: Request) -> None:
        """Move the blocks to which later tokens attend into the host pool, and free all tables of the request."""
        request_id, num_tokens = request.request_id, request.num_computed_tokens
        end, starts = self.num_blocks_for(num_tokens), self._starts(request_id, num_tokens)
        tables = self.tables.pop(request_id)
        host_tables = tuple(
            BlockTable.of(self.host_pool, self.host_pool.allocate(max(0, end - start)), min(start, end))
            for start in starts
        )
        self._move(BlockMoveKind.SWAP_OUT, tables, host_tables, 0, num_tokens)
        self._host_tables[request_id] = host_tables
        for table in reversed(tables):
            self.pool.free(reversed(list(table)))
        self._unshared.discard(request_id)
        if self.states is not None:
            self.states.swap_out(request_id)

    def is_swapped(self, request_id: str) -> bool:
        return request_id in self._host_tables

    # --- KV transfer between replicas -------------------------------------------------------------------------------

    def add_import(self, request_id: str, transfer: Transfer) -> None:
        if transfer.block_ids:
            blocks = BlockTable(transfer.block_ids, transfer.epochs, transfer.start)
            starts = [each.first_block(transfer.num_tokens, self.block_size) for each in self.groups.windows]
            self._import_tables[request_id] = blocks.split(
                [transfer.start, *starts[1:]], transfer.num_tokens, self.block_size
            )

    def export(self, request_id: str, num_tokens: int) -> list[BlockMove] | None:
        """Plan the copies of KV blocks into the transfer pool, from which another replica fetches them.

        The caller adds the returned copies to the step that completes the first `num_tokens` tokens. Return None if the
        pool is full. Blocks to which no later token attends, such as those before a sliding window, are not copied.
        """
        starts, end = self._starts(request_id, num_tokens), self.num_blocks_for(num_tokens)
        num_pieces = 0 if self.states is None else self.states.num_pieces
        count = sum(end - start for start in starts) + num_pieces
        blocks = self.transfer_pool.allocate(request_id, starts[0], starts[0] + count, num_tokens)
        if blocks is None:
            return None
        targets = blocks.split(starts, num_tokens, self.block_size)
        moves = block_moves(BlockMoveKind.EXPORT, self.tables[request_id], targets, 0, num_tokens, self.block_size)
        if self.states is not None:
            moves += self.states.export(request_id, blocks.blocks(end), num_tokens)
        return moves

    def prompt_hashes(self, request: Request) -> list[bytes]:
        return self._hashes_of(request, request.num_prompt_tokens // self.block_size)

    def import_from_disk(self, request: Request, num_shared: int) -> int:
        """Plan copies of blocks that a request found on disk. Return `num_shared` (in tokens) plus copied tokens."""
        assert self.disk is not None
        table, hashes = self.table(request.request_id), self.prompt_hashes(request)
        moves = self.disk.imports(request.request_id, table, num_shared // self.block_size, hashes, self.pool)
        self._block_moves += moves
        return num_shared + len(moves) * self.block_size

    def pop_released_imports(self) -> list[TransferBlock]:
        """Return imported blocks that other replicas may free once the steps formed so far have run."""
        released, self._released_imports = self._released_imports, []
        return released

    def reset(self) -> None:
        """Drop all tables, hashes and planned block copies, because the WorkAgent has lost the cache and the host pool.

        Blocks that other replicas may fetch stay valid. Blocks to fetch from other replicas or from disk are dropped
        too, because reading them may have caused the loss.
        """
        for request_id in [*self.tables, *self._host_tables, *self._import_tables]:
            self.free(request_id)
        self.pool.clear_hashes()
        self._block_moves.clear()
        self.transfer_pool.cancel_all()
        if self.states is not None:
            self.states.reset()
        if self.disk is not None:
            self.disk.reset()

    def pop_block_moves(self) -> list[BlockMove]:
        moves, self._block_moves = self._block_moves, []
        return moves

    def check_integrity(self) -> None:
        self.pool.check_integrity(_blocks_of(self.tables.values()))
        self.host_pool.check_integrity(_blocks_of(self._host_tables.values()))
        assert not self.tables.keys() & self._host_tables.keys(), "a request is both swapped and in the cache"
        assert not self.tables.keys() & self._import_tables.keys(), "a request is both to be imported and in the cache"
        self.transfer_pool.check_integrity()
        for group, most in enumerate(self.max_blocks):
            most_held = max((len(tables[group]) for tables in self.tables.values()), default=0)
            assert most_held <= most, "a request holds more than the window and a step"
        counts = {self.pool.ref_count(each) for each in _blocks_of(self.tables[name] for name in self._unshared)}
        assert counts <= {1}, "a request with guaranteed blocks shares some"
        if self.states is not None:
            self.states.check_integrity(self.tables, self._host_tables)
        if self.disk is not None:
            self.disk.exports.check_integrity()

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _recycles_blocks(self, num_tokens: int) -> bool:
        return self.num_blocks_for(num_tokens) > min(self.max_blocks)

    def _shared_blocks(self, request: Request, parent: Request | None, unshared: bool) -> Tables:
        """Return the full blocks of the longest prefix shared with `parent` or found by hash; none if `unshared`."""
        sources: Tables = ()
        num_common, hashes = 0, list[bytes]()
        if not unshared and parent is not None and parent.request_id not in self._unshared:
            sources = self.tables[parent.request_id]
            num_common = self._num_tokens_shared_with(request, parent) // self.block_size
        if not unshared and self.prefix_caching and request.max_prefix_hit_tokens >= self.block_size:
            hashes = self._shareable_hashes(request)
        if not (num_common or hashes):
            return tuple([BlockTable() for _ in self.max_blocks])
        search = PrefixSearch(self.groups.windows, self.block_size, self.pool, sources, num_common, hashes)
        return search.tables(None if self.states is None else self.states.is_checkpoint)

    def _num_tokens_shared_with(self, request: Request, parent: Request) -> int:
        most = min(request.max_prefix_hit_tokens, parent.num_confirmed_tokens)
        if request.known_token_ids(0, most) == parent.known_token_ids(0, most):
            return most
        pairs = zip(request.known_token_ids(0, most), parent.known_token_ids(0, most), strict=True)
        return next(index for index, (ours, theirs) in enumerate(pairs) if ours != theirs)

    def _shareable_hashes(self, request: Request) -> list[bytes]:
        """Return the hashes of all blocks that the request may share with earlier requests."""
        return self._hashes_of(request, request.max_prefix_hit_tokens // self.block_size)

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
        request_id, computed = request.request_id, request.num_computed_tokens
        kind, outside = BlockMoveKind.SWAP_IN, self._host_tables.pop(request_id, None)
        if outside is None:
            kind, outside = BlockMoveKind.IMPORT, self._import_tables.pop(request_id)
        tables = tuple([BlockTable(start=each.start) for each in outside])
        self._allocate(tables, num_tokens)
        self._move(kind, outside, tables, 0, computed)
        if kind is BlockMoveKind.SWAP_IN:
            self.host_pool.free(chain.from_iterable(outside))
            if self.states is not None:
                self.states.swap_in(request_id)
        else:
            self._release_import(outside)
            if self.states is not None:
                pieces = outside[0].blocks(self.num_blocks_for(computed))
                self._block_moves += self.states.admit_import(request_id, pieces, computed)
        self.tables[request_id] = tables

    def _release_import(self, tables: Tables) -> None:
        for table in tables:
            self._released_imports += table.blocks(table.start)

    def _move(self, kind: BlockMoveKind, sources: Tables, targets: Tables, start: int, num_tokens: int) -> None:
        self._block_moves += block_moves(kind, sources, targets, start, num_tokens, self.block_size)

    def _starts(self, request_id: str, num_tokens: int) -> list[int]:
        return [
            max(table.start, window.first_block(num_tokens, self.block_size))
            for window, table in zip(self.groups.windows, self.tables[request_id], strict=True)
        ]

    def _allocate(self, tables: Tables, num_tokens: int) -> None:
        num_entries = self.num_blocks_for(num_tokens)
        for table, most in zip(tables, self.max_blocks, strict=True):
            count = min(num_entries, table.start + most) - len(table.ids)
            if count > 0:
                table.extend(self.pool.allocate(count), self.pool)


def _blocks_of(tables: Iterable[Tables]) -> Iterable[int]:
    return chain.from_iterable(chain.from_iterable(tables))
