"""Slots of states: each request finds one, checkpoints are only read, and drafts are rolled back by choosing a slot."""

from __future__ import annotations

from llm_serving.core.request import Request
from llm_serving.core.step import STATE_BEFORE, BlockMoveKind
from llm_serving.kvcache import BlockManager, StateSlots
from llm_serving.kvcache.transfer_pool import TransferPool
from support.factories import create_request

BLOCK_SIZE = 4


def manager(num_spare: int = 4, max_running: int = 2, **options: int | bool) -> BlockManager:
    states = StateSlots(max_running + num_spare, max_running, BLOCK_SIZE)
    return BlockManager(**{"num_blocks": 32, "block_size": BLOCK_SIZE, "states": states, **options})


def states_of(blocks: BlockManager) -> StateSlots:
    assert blocks.states is not None
    return blocks.states


def compute(blocks: BlockManager, request: Request, num_tokens: int, num_drafts: int = 0) -> list[tuple[int, int]]:
    """Compute tokens of a request in a step of its own; return (token, slot) of its accesses."""
    start, states = request.num_computed_tokens, states_of(blocks)
    if num_drafts:
        states.add_drafts(request.request_id, num_drafts)
    states.add_row(0, request.request_id, start, num_tokens + num_drafts)
    accesses = states.pop_accesses()
    request.num_computed_tokens = start + num_tokens
    blocks.cache_full_blocks(request, request.num_computed_tokens)
    request.num_confirmed_tokens = request.num_computed_tokens
    blocks.check_integrity()
    return sorted((access.token, access.slot) for access in accesses)


def admit(blocks: BlockManager, request: Request) -> int:
    request.num_computed_tokens = request.num_confirmed_tokens = blocks.admit(request, request.num_tokens)
    blocks.check_integrity()
    return request.num_computed_tokens


def test_request_reads_and_stores_its_own_state_slot() -> None:
    blocks = manager(prefix_caching=False)
    request = create_request(10, request_id="a")
    assert admit(blocks, request) == 0
    assert compute(blocks, request, 6) == [(5, 0)], "the first tokens read no state"
    assert compute(blocks, request, 4) == [(STATE_BEFORE, 0), (3, 0)]


def test_a_prompt_stores_a_checkpoint_after_its_last_full_block() -> None:
    blocks = manager()
    request = create_request(10, request_id="a")
    admit(blocks, request)
    assert compute(blocks, request, 10) == [(7, 1), (9, 0)]
    again = create_request(10, request_id="b")
    assert admit(blocks, again) == 8
    assert compute(blocks, again, 2) == [(STATE_BEFORE, 1), (1, 2)], "the checkpoint is read, not written"


def test_a_chunk_that_ends_at_the_checkpoint_continues_from_it() -> None:
    blocks = manager()
    request = create_request(10, request_id="a")
    admit(blocks, request)
    assert compute(blocks, request, 8) == [(7, 1)]
    assert compute(blocks, request, 2) == [(STATE_BEFORE, 1), (1, 0)]


def test_the_newest_token_of_whole_blocks_is_computed_from_an_earlier_checkpoint() -> None:
    blocks = manager()
    admit(blocks, request := create_request(8, request_id="a"))
    assert compute(blocks, request, 8) == [(3, 1), (7, 0)]
    assert admit(blocks, create_request(8, request_id="b")) == 4


def test_common_prefix_gets_a_state_checkpoint_at_its_second_use() -> None:
    blocks = manager(max_running=3)
    requests = [create_request(14, request_id=name) for name in "abc"]
    for number, request in enumerate(requests):
        request.prompt_token_ids[9:] = [number] * 5
    found = []
    for request in requests:
        found.append(admit(blocks, request))
        compute(blocks, request, 14 - request.num_computed_tokens)
    assert found == [0, 0, 8]


def test_cached_blocks_without_a_checkpoint_are_computed_again() -> None:
    blocks = manager(num_spare=0)
    admit(blocks, request := create_request(10, request_id="a"))
    compute(blocks, request, 10)
    assert admit(blocks, create_request(10, request_id="b")) == 0


def test_least_recently_used_checkpoint_is_evicted() -> None:
    blocks = manager(num_spare=2, max_running=1)
    prompts = [create_request(6, request_id=name) for name in "abcd"]
    for number, request in enumerate(prompts[:3]):
        request.prompt_token_ids[:] = [number] * 6
        admit(blocks, request)
        compute(blocks, request, 6)
        blocks.free(request.request_id)
    found = []
    for number in (2, 1, 0):
        request = create_request(6, request_id="again")
        request.prompt_token_ids[:] = [number] * 6
        found.append(admit(blocks, request))
        blocks.free("again")
    assert found == [4, 4, 0]


def test_the_latest_block_of_an_output_has_a_checkpoint_in_place_of_the_one_before() -> None:
    blocks = manager()
    admit(blocks, request := create_request(6, request_id="a", max_tokens=20))
    compute(blocks, request, 6)
    accesses = []
    for token_id in range(8):
        request.output_token_ids.append(token_id)
        blocks.grow("a", request.num_tokens)
        accesses.append(compute(blocks, request, 1))
    assert accesses[1:3] == [[(STATE_BEFORE, 0), (0, 2)], [(STATE_BEFORE, 2), (0, 0)]]
    assert accesses[5] == [(STATE_BEFORE, 0), (0, 2)], "the slot of the dropped checkpoint is used again"
    assert states_of(blocks).pool.num_cached_blocks == 2, "those after 4 and after 12 tokens"
    blocks.free("a")
    longer = create_request(6, request_id="b")
    longer.prompt_token_ids.extend(request.output_token_ids)
    assert admit(blocks, longer) == 12


def test_every_running_request_gets_a_state_slot() -> None:
    blocks = manager(num_spare=3, max_running=3)
    admit(blocks, first := create_request(10, request_id="a"))
    compute(blocks, first, 10)
    assert states_of(blocks).num_spare == 3, "an unused checkpoint takes no room"
    compute(blocks, first, 1, num_drafts=3)
    assert states_of(blocks).num_spare == 0
    for name in "bc":
        assert admit(blocks, create_request(10, request_id=name)) == 0, "the checkpoint would take a spare slot"


def test_rejected_drafts_are_rolled_back_by_the_choice_of_a_slot() -> None:
    blocks = manager(num_spare=3, prefix_caching=False)
    admit(blocks, request := create_request(5, request_id="a"))
    compute(blocks, request, 4)
    assert compute(blocks, request, 1, num_drafts=3) == [(STATE_BEFORE, 0), (0, 0), (1, 1), (2, 2), (3, 3)]
    states_of(blocks).accept_drafts("a", 2)
    request.num_computed_tokens += 2
    assert compute(blocks, request, 1) == [(STATE_BEFORE, 2), (0, 2)]
    assert states_of(blocks).pool.num_used_blocks == 1


def test_checkpoints_take_no_slot_that_drafts_of_the_step_need() -> None:
    blocks = manager(num_spare=1)
    requests = [create_request(7, request_id=name) for name in "ab"]
    for number, request in enumerate(requests):
        request.prompt_token_ids[:] = [number] * 7
        admit(blocks, request)
        compute(blocks, request, 7)
        request.output_token_ids.append(5)
    states = states_of(blocks)
    states.add_drafts("b", 1)
    states.add_row(0, "a", 7, 1)
    states.add_row(1, "b", 7, 2)
    assert [(row, token) for row, token, _, _ in states.pop_accesses()] == [(0, -1), (0, 0), (1, -1), (1, 1), (1, 0)]


def test_drafts_that_are_all_rejected_leave_the_state_after_the_newest_token() -> None:
    blocks = manager(num_spare=3, prefix_caching=False)
    admit(blocks, request := create_request(5, request_id="a"))
    compute(blocks, request, 5, num_drafts=2)
    states_of(blocks).accept_drafts("a", 0)
    assert compute(blocks, request, 1) == [(STATE_BEFORE, 0), (0, 0)]


def test_a_swapped_request_keeps_its_slot() -> None:
    blocks = manager(num_spare=2, num_swap_blocks=8, prefix_caching=False)
    admit(blocks, request := create_request(6, request_id="a"))
    compute(blocks, request, 6)
    assert blocks.can_swap_out(request)
    blocks.swap_out(request)
    blocks.check_integrity()
    assert states_of(blocks).num_spare == 1
    blocks.admit(request, 7)
    assert states_of(blocks).num_spare == 2
    assert compute(blocks, request, 1) == [(STATE_BEFORE, 0), (0, 0)]


def test_a_request_is_not_swapped_if_its_slot_were_the_last_spare_one() -> None:
    blocks = manager(num_spare=1, num_swap_blocks=8)
    admit(blocks, request := create_request(6, request_id="a"))
    compute(blocks, request, 6)
    assert not blocks.can_swap_out(request)


def test_a_fork_computes_the_tokens_after_the_checkpoint_again() -> None:
    blocks = manager()
    admit(blocks, parent := create_request(10, request_id="a"))
    compute(blocks, parent, 10)
    fork = create_request(10, request_id="b", fork_of="a")
    assert blocks.admit(fork, 10, parent) == 8
    assert blocks.pop_block_moves() == []


def test_lost_cache_has_no_state_checkpoints() -> None:
    blocks = manager()
    admit(blocks, request := create_request(10, request_id="a"))
    compute(blocks, request, 10)
    states_of(blocks).add_row(0, "a", 10, 1)
    blocks.reset()
    blocks.check_integrity()
    assert states_of(blocks).pool.num_used_blocks == 0
    assert states_of(blocks).pop_accesses() == []
    assert admit(blocks, create_request(10, request_id="b")) == 0


def test_a_state_is_exported_behind_the_blocks_and_imported_to_a_slot() -> None:
    states = StateSlots(4, 2, BLOCK_SIZE, num_pieces=2)
    source = BlockManager(32, BLOCK_SIZE, states=states, exports=TransferPool(8))
    admit(source, request := create_request(10, request_id="a"))
    compute(source, request, 10)
    moves = source.export("a", 10)
    assert moves is not None
    own, epoch = 0, states.pool.epoch(0)
    assert [move.kind for move in moves] == [BlockMoveKind.EXPORT] * 3 + [BlockMoveKind.EXPORT_STATE] * 2
    assert [(*move[1:4], move.num_tokens) for move in moves[3:]] == [(own, 3, epoch, 10), (own, 4, epoch, 10)]
    source.check_integrity()
    transfer = source.transfer_pool.hand_over("a")
    target = manager()
    migrated = create_request(10, request_id="a")
    migrated.num_computed_tokens = transfer.num_tokens
    target.add_import("a", transfer)
    target.admit(migrated, 11)
    target.check_integrity()
    imports = target.pop_block_moves()
    assert [move.kind for move in imports] == [BlockMoveKind.IMPORT] * 3 + [BlockMoveKind.IMPORT_STATE] * 2
    assert [move[1:3] for move in imports[3:]] == [(3, 0), (4, 0)]
    assert target.pop_released_imports() == transfer.blocks
    assert compute(target, migrated, 1) == [(STATE_BEFORE, 0), (0, 0)]
