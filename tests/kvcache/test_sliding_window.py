"""With a sliding window in every layer, a request of any length holds the window and a step."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from llm_serving.core.request import Request
from llm_serving.core.step import NO_BLOCK, BlockMoveKind
from llm_serving.core.window import CacheGroups, LayerWindow, Window
from llm_serving.kvcache import BlockManager
from support.factories import create_request
from support.scheduler_run import check_readable, check_writable

WINDOW = Window(num_tokens=6, max_chunk=8)
"""Window in tokens. Blocks have 4 tokens: 5 + 8 consecutive tokens lie in at most 4 blocks."""


def manager(num_blocks: int = 16, **options: object) -> BlockManager:
    return BlockManager(num_blocks, 4, groups=CacheGroups((WINDOW,)), **options)


def compute(blocks: BlockManager, request: Request, end: int) -> None:
    """Compute the tokens up to `end` step by step while there are free blocks."""
    while request.num_computed_tokens < end:
        blocks.free_outside_window(request.request_id, request.num_computed_tokens)
        blocks.grow(request.request_id, request.num_tokens)
        room = blocks.num_tokens_with_blocks(request.request_id)
        request.num_computed_tokens = min(end, room, request.num_computed_tokens + WINDOW.max_chunk)
        check_readable(blocks, request.request_id, request.num_confirmed_tokens)
        blocks.cache_full_blocks(request, request.num_computed_tokens)
        request.num_confirmed_tokens = request.num_computed_tokens
        blocks.check_integrity()


def started(blocks: BlockManager, num_tokens: int, request_id: str = "a", **options: bool) -> Request:
    request = create_request(num_tokens, request_id=request_id)
    request.cache_salt = "" if request_id in ("a", "b") else request_id
    request.num_computed_tokens = request.num_confirmed_tokens = blocks.admit(request, num_tokens, **options)
    return request


def test_long_prompt_allocates_blocks_for_the_window_and_a_step() -> None:
    blocks = manager(num_blocks=4)
    request = create_request(100, request_id="a")
    assert blocks.max_request_tokens >= 100
    assert blocks.num_blocks_to_admit(request, 100) == 4
    blocks.admit(request, 100)
    compute(blocks, request, 100)
    table = blocks.table("a")
    assert (table.start, table.end) == (22, 25), "the last step began at token 96 or before, and saw from 91 on"
    assert list(table.ids[:22]) == [NO_BLOCK] * 22
    assert len(blocks.block_table("a")) == 3


def test_cache_smaller_than_a_step_shortens_the_steps() -> None:
    blocks = manager(num_blocks=3)
    request = started(blocks, 40)
    compute(blocks, request, 40)
    assert blocks.num_blocks_held("a") <= 3
    assert manager(num_blocks=2).max_request_tokens == 8


def test_a_prefix_hit_needs_only_the_blocks_of_the_window() -> None:
    blocks = manager(num_blocks=9)
    compute(blocks, started(blocks, 24), 24)
    blocks.free("a")
    other = started(blocks, 12, "other")  # takes blocks that have no names, then the one unused for longest
    other.prompt_token_ids = [7] * 12
    held = blocks.block_table("other")
    request = create_request(25, request_id="again")
    assert blocks.num_blocks_to_admit(request, 25) == 1 + 2, "two blocks of the hit are free, and count as taken"
    assert blocks.admit(request, 25) == 24
    assert blocks.table("again").start == 4, "token 24 sees from token 19 on"
    assert not {*held} & {*blocks.block_table("again")}


def test_a_missing_block_of_the_window_prevents_a_prefix_hit() -> None:
    blocks = manager()
    first = started(blocks, 24)
    compute(blocks, first, 24)
    lost = blocks.table("a").ids[-1]
    blocks.free("a")
    del blocks.pool._blocks_by_hash[blocks.pool._hashes[lost]]
    blocks.pool._hashes[lost] = None
    request = create_request(25, request_id="again")
    assert blocks.admit(request, 25) == 20, "the last block is gone, the two before it are what token 20 sees"
    assert blocks.table("again").start == 3


def test_block_behind_a_window_is_kept_for_requests_that_share_it() -> None:
    blocks = manager()
    first = started(blocks, 12, "a")
    compute(blocks, first, 12)
    second = started(blocks, 13, "b")
    shared = set(blocks.block_table("a")) & set(blocks.block_table("b"))
    assert second.num_computed_tokens == 12
    assert len(shared) == 2
    first.output_token_ids += [9] * 20
    compute(blocks, first, 32)
    assert shared <= set(blocks.block_table("b"))
    assert not shared & set(blocks.block_table("a"))
    assert {blocks.pool.ref_count(each) for each in shared} == {1}


def test_request_with_guaranteed_blocks_never_lacks_one() -> None:
    blocks = manager(num_blocks=10)
    compute(blocks, started(blocks, 20), 20)
    kept = create_request(60, request_id="kept")
    assert blocks.num_blocks_to_admit(kept, 80, guaranteed=True) == 4
    assert blocks.admit(kept, 80, guaranteed=True) == 0, "the hit would not become free when it slides"
    for number in range(blocks.pool.num_free_blocks):
        started(blocks, 4, f"other {number}")
    assert not blocks.pool.num_free_blocks
    compute(blocks, kept, 60)
    blocks.free("kept")
    again = create_request(61, request_id="again")
    assert blocks.admit(again, 61) <= 20, "a request with guaranteed blocks caches none"


def test_swap_out_covers_only_the_window() -> None:
    blocks = manager(num_swap_blocks=3)
    request = started(blocks, 42)
    compute(blocks, request, 41)
    assert blocks.num_blocks_to_swap(request) == 2, "token 41 sees from 36 on"
    blocks.swap_out(request)
    assert blocks.host_pool.num_used_blocks == 2
    assert blocks.num_blocks_to_admit(request, 42) == 2
    assert blocks.admit(request, 42) == 41
    assert blocks.table("a").start == 9
    out, back = blocks.pop_block_moves()[:2], blocks.pop_block_moves()
    assert [move.kind for move in out] == [int(BlockMoveKind.SWAP_OUT)] * 2
    assert not back


@pytest.mark.parametrize("window", [None, 100])
def test_window_as_long_as_the_request_frees_no_block(window: int | None) -> None:
    sees = CacheGroups.of((LayerWindow(window or 0),), 8, 100)
    assert not sees.is_sliding
    assert sees.max_blocks_of(100, 4) == 25
    assert sees.max_request_tokens(4, 10) == 40


class SlidingMachine(RuleBasedStateMachine):
    """Operations in any order over a memory of tokens; checks that each computed token reads its whole window."""

    BLOCK_SIZE, NUM_BLOCKS, NUM_SWAP_BLOCKS = 4, 12, 6
    GROUPS = CacheGroups((WINDOW,))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(
            self.NUM_BLOCKS, self.BLOCK_SIZE, groups=self.GROUPS, num_swap_blocks=self.NUM_SWAP_BLOCKS
        )
        self.memory: dict[int, list[int]] = {}
        self.host: dict[int, list[int]] = {}
        self.held: dict[str, Request] = {}
        self.swapped: dict[str, Request] = {}
        self.count = 0

    def follow_moves(self) -> None:
        for kind, source, target, *_ in self.blocks.pop_block_moves():
            sources = self.host if kind == BlockMoveKind.SWAP_IN else self.memory
            targets = self.host if kind == BlockMoveKind.SWAP_OUT else self.memory
            targets[target] = list(sources[source])

    def start(self, request: Request, parent: Request | None, guaranteed: bool) -> None:
        num_tokens = request.max_num_tokens if guaranteed else request.num_tokens
        if num_tokens > self.blocks.max_request_tokens:
            return
        needed = self.blocks.num_blocks_to_admit(request, num_tokens, parent, guaranteed=guaranteed)
        free = self.blocks.pool.num_free_blocks
        if needed > free:
            return
        found = self.blocks.admit(request, num_tokens, parent, guaranteed=guaranteed)
        assert free - self.blocks.pool.num_free_blocks == needed
        assert found < request.num_tokens
        request.num_computed_tokens = request.num_confirmed_tokens = found
        self.held[request.request_id] = request
        self.follow_moves()

    def pick(self, data: st.DataObject, requests: dict[str, Request]) -> Request:
        return requests[data.draw(st.sampled_from(sorted(requests)))]

    @rule(num_tokens=st.integers(1, 40), kind=st.integers(0, 1), guaranteed=st.booleans())
    def admit(self, num_tokens: int, kind: int, guaranteed: bool) -> None:
        self.count += 1
        request = create_request(num_tokens, request_id=f"{self.count:03}", max_tokens=20)
        request.prompt_token_ids = [token + kind * (index > 17) for index, token in enumerate(request.prompt_token_ids)]
        self.start(request, None, guaranteed)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), back=st.integers(0, 12), guaranteed=st.booleans())
    def fork(self, data: st.DataObject, back: int, guaranteed: bool) -> None:
        parent = self.pick(data, self.held)
        self.count += 1
        child = create_request(1, request_id=f"{self.count:03}", max_tokens=20)
        length = max(0, parent.num_tokens_known - back)
        child.prompt_token_ids = [*parent.known_token_ids(0, length), 500 + self.count]
        self.start(child, parent, guaranteed)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), most=st.integers(1, WINDOW.max_chunk))
    def compute(self, data: st.DataObject, most: int) -> None:
        request = self.pick(data, self.held)
        name, blocks, size = request.request_id, self.blocks, self.BLOCK_SIZE
        if request.num_uncomputed_tokens == 0:
            if request.num_output_tokens >= request.sampling.max_tokens:
                return
            request.output_token_ids.append(900 + self.count)
        blocks.free_outside_window(name, request.num_computed_tokens)
        guaranteed = name in blocks._unshared
        num_tokens = request.max_num_tokens if guaranteed else request.num_tokens
        if blocks.grow(name, num_tokens) is None:
            assert not guaranteed, "it takes no more than it gives back"
            return
        start = request.num_computed_tokens
        end = min(request.num_tokens, start + most, blocks.num_tokens_with_blocks(name))
        assert end > start, "no step is too small"
        check_writable(blocks, name, start, end)
        for window, table in zip(self.GROUPS.windows, blocks.tables[name], strict=True):
            for position in range(start, end):
                block = self.memory.setdefault(table.ids[position // size], [-1] * size)
                block[position % size] = request.known_token_ids(position, position + 1)[0]
            first = (
                start // window.num_tokens * window.num_tokens if window.is_chunked else start + 1 - window.num_tokens
            )
            for position in range(max(0, first), end):
                block_id = table.ids[position // size]
                assert block_id != NO_BLOCK
                assert self.memory[block_id][position % size] == request.known_token_ids(position, position + 1)[0]
        request.num_computed_tokens = end
        blocks.cache_full_blocks(request, end)
        request.num_confirmed_tokens = end

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        request = self.pick(data, self.held)
        if self.blocks.can_swap_out(request):
            self.blocks.swap_out(request)
            self.swapped[request.request_id] = self.held.pop(request.request_id)
            self.follow_moves()

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        request = self.pick(data, self.swapped)
        computed = request.num_computed_tokens
        if request.num_uncomputed_tokens == 0 and request.num_output_tokens < request.sampling.max_tokens:
            request.output_token_ids.append(700)
        if self.blocks.num_blocks_to_admit(request, request.num_tokens) <= self.blocks.pool.num_free_blocks:
            assert self.blocks.admit(request, request.num_tokens) == computed
            self.held[request.request_id] = self.swapped.pop(request.request_id)
            self.follow_moves()

    @precondition(lambda self: self.held or self.swapped)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = self.pick(data, self.held | self.swapped)
        self.blocks.free(request.request_id)
        self.held.pop(request.request_id, None)
        self.swapped.pop(request.request_id, None)

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.blocks.check_integrity()
        if not self.held and not self.swapped:
            assert self.blocks.pool.num_used_blocks == self.blocks.host_pool.num_used_blocks == 0


TestSlidingMachine = SlidingMachine.TestCase
TestSlidingMachine.settings = settings(max_examples=60, stateful_step_count=40)


class GroupsMachine(SlidingMachine):
    """The same with groups of layers: without a window, with two sizes of windows, and with chunks."""

    NUM_BLOCKS, NUM_SWAP_BLOCKS = 48, 24
    GROUPS = CacheGroups((Window(), WINDOW, WINDOW, Window(7, 8, is_chunked=True)))


TestGroupsMachine = GroupsMachine.TestCase
TestGroupsMachine.settings = settings(max_examples=40, stateful_step_count=40)
