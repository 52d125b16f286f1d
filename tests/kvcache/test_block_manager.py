"""Block tables grow, share, are copied and swapped; no block is lost or written by two requests."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from llm_serving.core.request import Request
from llm_serving.core.step import BlockMoveKind
from llm_serving.kvcache import BlockManager
from support.factories import create_request
from support.scheduler_run import check_writable

COPY, SWAP_OUT, SWAP_IN, EXPORT, IMPORT, *_ = map(int, BlockMoveKind)


def admit(blocks: BlockManager, request: Request, parent: Request | None = None) -> int:
    """Admit a request and compute all its tokens, as confirmed replies do."""
    found = blocks.admit(request, request.num_tokens, parent)
    confirm(blocks, request)
    return found


def confirm(blocks: BlockManager, request: Request) -> None:
    request.num_computed_tokens = request.num_tokens
    blocks.cache_full_blocks(request, request.num_tokens)
    request.num_confirmed_tokens = request.num_tokens


def test_block_table_grows_block_by_block() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    request = create_request(4, request_id="a")
    admit(blocks, request)
    assert blocks.block_table("a") == [0]
    blocks.grow("a", 5)
    assert blocks.block_table("a") == [0, 1]
    blocks.grow("a", 8)
    assert blocks.block_table("a") == [0, 1]
    assert blocks.pool.num_used_blocks == blocks.pool.num_blocks // 2


def test_block_table_may_grow_by_the_last_free_block() -> None:
    blocks = BlockManager(num_blocks=2, block_size=4)
    admit(blocks, create_request(4, request_id="a"))
    assert blocks.grow("a", 9) is None
    assert blocks.grow("a", 8) == 1


def test_can_ever_fit_counts_whole_blocks() -> None:
    blocks = BlockManager(num_blocks=2, block_size=4)
    assert blocks.max_request_tokens == 8


def test_full_blocks_of_an_equal_prefix_are_shared() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    first, second = create_request(10, request_id="a"), create_request(11, request_id="b")
    assert admit(blocks, first) == 0
    assert blocks.num_blocks_to_admit(second, 11) == 1
    assert admit(blocks, second) == 8
    assert blocks.block_table("b")[:2] == blocks.block_table("a")[:2]
    blocks.check_integrity()


def test_prefix_hit_never_covers_the_newest_token() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    first, second = create_request(8, request_id="a"), create_request(8, request_id="b")
    admit(blocks, first)
    assert blocks.admit(second, 8) == 4


def test_prefix_cache_keeps_blocks_of_finished_requests() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    admit(blocks, create_request(9, request_id="a"))
    blocks.free("a")
    assert blocks.pool.num_used_blocks == 0
    again = create_request(9, request_id="b")
    assert blocks.num_blocks_to_admit(again, 9) == 3, "free blocks that are found are taken all the same"
    assert admit(blocks, again) == 8


def test_prefix_cache_namespaces_share_no_blocks() -> None:
    blocks = BlockManager(num_blocks=32, block_size=4)
    admit(blocks, create_request(9, request_id="a"))
    spaces = [
        {"cache_salt": "x"},
        {"tenant": "x"},
        {"tenant": "x", "cache_salt": "y"},
        {"tenant": "x\0y"},
        {"adapter": 1},
        {"cache_salt": "\x001"},
    ]
    for name, changes in zip("bcdefg", spaces, strict=True):
        other = create_request(9, request_id=name)
        for field, value in changes.items():
            setattr(other, field, value)
        assert admit(blocks, other) == 0


def test_no_block_is_shared_without_prefix_caching() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4, prefix_caching=False)
    admit(blocks, create_request(9, request_id="a"))
    assert admit(blocks, create_request(9, request_id="b")) == 0


def test_fork_shares_full_blocks_and_copies_the_one_in_which_it_starts() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4, prefix_caching=False)
    parent = create_request(10, request_id="a")
    child = replace(parent, request_id="b")
    admit(blocks, parent)
    assert blocks.num_blocks_to_admit(child, 10, parent) == 1
    assert blocks.admit(child, 10, parent) == 9
    table, other = blocks.block_table("a"), blocks.block_table("b")
    assert other[:2] == table[:2]
    epochs = blocks.table("a").epochs[2], blocks.table("b").epochs[2]
    assert blocks.pop_block_moves() == [(COPY, table[2], other[2], *epochs, 1)]
    check_writable(blocks, "b", 9, 10)


def fork_after_a_block_was_given_away(index: int) -> BlockManager:
    blocks = BlockManager(num_blocks=8, block_size=4)
    parent = create_request(10, request_id="a")
    admit(blocks, parent)
    blocks.pool._epochs[blocks.block_table("a")[index]] += 1000
    blocks.admit(replace(parent, request_id="b"), 10, parent)
    return blocks


def test_fork_uses_the_parents_epochs_even_if_a_block_was_reallocated() -> None:
    blocks = fork_after_a_block_was_given_away(0)
    assert blocks.table("b").ids[:2] == blocks.table("a").ids[:2]
    assert blocks.table("b").epochs[:2] == blocks.table("a").epochs[:2]


def test_copy_uses_the_parents_epoch_even_if_the_block_was_reallocated() -> None:
    blocks = fork_after_a_block_was_given_away(2)
    (move,) = blocks.pop_block_moves()
    assert (move.source_epoch, move.target_epoch) == (blocks.table("a").epochs[2], blocks.table("b").epochs[2])


def test_swapped_blocks_keep_their_epochs() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4, num_swap_blocks=3)
    request = create_request(10, request_id="a")
    admit(blocks, request)
    blocks.swap_out(request)
    blocks.admit(request, 11)
    moves = blocks.pop_block_moves()
    out, back = moves[:3], moves[3:]
    assert [(move.target, move.target_epoch) for move in out] == [(move.source, move.source_epoch) for move in back]
    assert [move.target_epoch for move in back] == blocks.table("a").epochs.tolist()


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4, prefix_caching=False)
    parent = create_request(9, request_id="a")
    admit(blocks, parent)
    assert blocks.admit(replace(parent, request_id="b"), 9, parent) == 8
    assert blocks.pop_block_moves() == []


def test_fork_shares_blocks_only_of_equal_tokens() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4, prefix_caching=False)
    parent = create_request(10, request_id="a")
    child = create_request(10, request_id="b")
    child.prompt_token_ids = [*parent.prompt_token_ids[:6], 7, 7, 7, 7]
    admit(blocks, parent)
    assert blocks.admit(child, 10, parent) == 6
    assert blocks.block_table("b")[0] == blocks.block_table("a")[0]
    assert [move.num_tokens for move in blocks.pop_block_moves()] == [2]


def test_swapped_in_request_has_all_computed_tokens() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4, num_swap_blocks=3)
    request = create_request(10, request_id="a")
    admit(blocks, request)
    assert blocks.can_swap_out(request)
    blocks.swap_out(request)
    assert blocks.pop_block_moves() == [(SWAP_OUT, i, i, i + 1, i + 1, count) for i, count in enumerate((4, 4, 2))]
    assert (blocks.pool.num_used_blocks, blocks.host_pool.num_used_blocks) == (0, 3)
    assert blocks.num_blocks_to_admit(request, 11) == 3
    assert blocks.admit(request, 11) == 10
    assert [(move.kind, move.num_tokens) for move in blocks.pop_block_moves()] == [
        (SWAP_IN, 4),
        (SWAP_IN, 4),
        (SWAP_IN, 2),
    ]
    assert blocks.host_pool.num_used_blocks == 0
    blocks.check_integrity()


def test_request_is_swapped_out_entirely_or_not_at_all() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4, num_swap_blocks=2)
    request = create_request(10, request_id="a")
    admit(blocks, request)
    assert not blocks.can_swap_out(request)


class BlockManagerMachine(RuleBasedStateMachine):
    """Operations in any order over a memory of tokens; checks that a request reads what it wrote."""

    BLOCK_SIZE, NUM_BLOCKS, NUM_SWAP_BLOCKS = 4, 12, 6

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(self.NUM_BLOCKS, self.BLOCK_SIZE, num_swap_blocks=self.NUM_SWAP_BLOCKS)
        self.memory = [[-1] * self.BLOCK_SIZE for _ in range(self.NUM_BLOCKS)]
        self.host = [[-1] * self.BLOCK_SIZE for _ in range(self.NUM_SWAP_BLOCKS)]
        self.held: dict[str, Request] = {}
        self.swapped: dict[str, Request] = {}
        self.count = 0

    def compute(self, request: Request) -> None:
        """Do the moves, then write the tokens that the request did not find in the cache."""
        for kind, source, target, *_ in self.blocks.pop_block_moves():
            sources = self.host if kind == SWAP_IN else self.memory
            targets = self.host if kind == SWAP_OUT else self.memory
            targets[target] = list(sources[source])
        check_writable(self.blocks, request.request_id, request.num_computed_tokens, request.num_tokens)
        table = self.blocks.block_table(request.request_id)
        for position in range(request.num_computed_tokens, request.num_tokens):
            block = self.memory[table[position // self.BLOCK_SIZE]]
            block[position % self.BLOCK_SIZE] = request.known_token_ids(position, position + 1)[0]
        confirm(self.blocks, request)

    def start(self, request: Request, parent: Request | None = None) -> None:
        needed = self.blocks.num_blocks_to_admit(request, request.num_tokens, parent)
        if needed > self.blocks.pool.num_free_blocks:
            return
        free = self.blocks.pool.num_free_blocks
        found = self.blocks.admit(request, request.num_tokens, parent)
        assert free - self.blocks.pool.num_free_blocks == needed
        request.num_computed_tokens = request.num_confirmed_tokens = found
        assert found < request.num_tokens
        self.held[request.request_id] = request
        self.compute(request)

    def pick(self, data: st.DataObject, requests: dict[str, Request]) -> Request:
        return requests[data.draw(st.sampled_from(sorted(requests)))]

    @rule(num_tokens=st.integers(1, 20), kind=st.integers(0, 2), salt=st.sampled_from(["", "x"]))
    def admit(self, num_tokens: int, kind: int, salt: str) -> None:
        self.count += 1
        request = create_request(num_tokens, request_id=f"{self.count:03}")
        request.prompt_token_ids = [token + kind * (index > 5) for index, token in enumerate(request.prompt_token_ids)]
        request.cache_salt = salt
        self.start(request)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), own=st.integers(0, 3))
    def fork(self, data: st.DataObject, own: int) -> None:
        parent = self.pick(data, self.held)
        self.count += 1
        child = create_request(1, request_id=f"{self.count:03}")
        child.prompt_token_ids = parent.known_token_ids(0, parent.num_tokens_known) + [500 + self.count] * own
        child.cache_salt = parent.cache_salt
        self.start(child, parent)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), more=st.integers(1, 6))
    def grow(self, data: st.DataObject, more: int) -> None:
        request = self.pick(data, self.held)
        if self.blocks.grow(request.request_id, request.num_tokens + more) is not None:
            request.output_token_ids += [900 + self.count] * more
            self.compute(request)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        request = self.pick(data, self.held)
        if self.blocks.can_swap_out(request):
            self.blocks.swap_out(request)
            self.swapped[request.request_id] = self.held.pop(request.request_id)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        request = self.pick(data, self.swapped)
        request.output_token_ids.append(700)
        if self.blocks.num_blocks_to_admit(request, request.num_tokens) <= self.blocks.pool.num_free_blocks:
            assert self.blocks.admit(request, request.num_tokens) == request.num_computed_tokens
            self.held[request.request_id] = self.swapped.pop(request.request_id)
            self.compute(request)
        else:
            request.output_token_ids.pop()

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

    @invariant()
    def everybody_reads_what_he_wrote(self) -> None:
        for request in self.held.values():
            table = self.blocks.block_table(request.request_id)
            tokens = [token for block_id in table for token in self.memory[block_id]]
            assert tokens[: request.num_tokens] == request.known_token_ids(0, request.num_tokens)


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=120, stateful_step_count=40)
