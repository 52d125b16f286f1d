"""The blocks of requests: in the cache, in the host pool, and in the transfer pools of other replicas."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from llm_serving.core.window import ONE_GROUP, CacheGroups
from llm_serving.kvcache.adapter_slots import AdapterSlots
from llm_serving.kvcache.block_pool import BlockPool
from llm_serving.kvcache.block_table import BlockTable, Tables
from llm_serving.kvcache.state_slots import StateSlots
from llm_serving.kvcache.transfer_pool import DiskPrefixes, TransferPool


class RequestBlocks:
    """The block pools of a replica, and the block tables of its requests. Only `BlockManager` changes them.

    A request has a table for each group of layers (`network.caches.CacheLayout`). Token i is in block `table[i //
    block_size]` at offset `i % block_size`.
    """

    states: StateSlots | None = None
    disk: DiskPrefixes | None = None

    adapters: AdapterSlots | None = None

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
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

    def max_blocks_of(self, num_tokens: int) -> int:
        return self.groups.max_blocks_of(num_tokens, self.block_size, self.pool.num_blocks)

    def num_blocks_shared(self, request_id: str) -> int:
        """Return the number of blocks at the start of the request's first table that other requests also use."""
        count, ref_count = 0, self.pool.ref_count
        for block_id in self.block_table(request_id):
            if ref_count(block_id) == 1:
                break
            count += 1
        return count

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

    def check_writable(self, request_id: str, start: int, end: int) -> None:
        num_entries = -(-end // self.block_size)
        for table in self.tables[request_id]:
            blocks = table.ids[start // self.block_size : num_entries]
            assert table.end >= num_entries, f"a table of {request_id} ends before token {end}"
            is_shared = any(self.pool.ref_count(block_id) != 1 for block_id in blocks)
            assert not is_shared, f"{request_id} would write shared blocks"

    def check_readable(self, request_id: str, num_computed: int) -> None:
        """Raise AssertionError if the request lacks a block to which its token at position `num_computed` attends."""
        for window, table in zip(self.groups.windows, self.tables[request_id], strict=True):
            first = window.first_block(num_computed, self.block_size)
            assert table.start <= first, f"a table of {request_id} begins at block {table.start}, it sees block {first}"


def _blocks_of(tables: Iterable[Tables]) -> Iterable[int]:
    return chain.from_iterable(chain.from_iterable(tables))
