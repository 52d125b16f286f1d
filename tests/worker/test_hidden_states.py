"""Hidden states of the newest tokens."""

from __future__ import annotations

import numpy as np
from llm_serving.core.step import DRAFT_WINDOW, BlockMoveKind
from llm_serving.worker.hidden_states import HiddenStates, newest_tokens
from support.step_factories import block_moves

SIZE, HIDDEN = 4, 3


def states_of(slots):
    """Return states that name their slot."""
    return np.repeat(np.array(slots, np.float32)[:, None], HIDDEN, axis=1)


def kept(states, block_ids, count, first=0):
    """Return the slots of the states that are kept of `count` tokens in some blocks."""
    return states.read(block_ids, first, count)[:, 0].tolist()


def filled(num_entries, *blocks):
    states = HiddenStates(num_entries, 16, SIZE, HIDDEN, "bfloat16")
    for block in blocks:
        slots = np.arange(SIZE * block, SIZE * block + SIZE, dtype=np.int32)
        states.keep(slots, states_of(slots))
    return states


def test_the_newest_tokens_of_each_row() -> None:
    assert newest_tokens(np.array([2, 1], np.int32)).tolist() == [0, 1, 2]
    assert newest_tokens(np.array([DRAFT_WINDOW + 2, 1], np.int32)).tolist() == [*range(2, DRAFT_WINDOW + 3)]


def test_states_are_read_from_the_latest_gap_on() -> None:
    states = filled(4, 5, 2)
    assert kept(states, [5, 2], 8) == [20, 21, 22, 23, 8, 9, 10, 11]
    assert kept(states, [5, 2], 5, first=1) == [21, 22, 23, 8, 9]
    assert kept(states, [5, 3, 2], 12) == [8, 9, 10, 11]
    assert kept(states, [5, 3], 8) == []
    states.drop(block_moves(), np.array([21], np.int32))
    assert kept(states, [5, 2], 8) == [22, 23, 8, 9, 10, 11]


def test_a_block_that_gets_other_content_loses_its_states() -> None:
    for kind, lost in ((BlockMoveKind.COPY, True), (BlockMoveKind.SWAP_IN, True), (BlockMoveKind.SWAP_OUT, False)):
        states = filled(4, 5)
        states.drop(block_moves((kind, 9, 5)), np.empty(0, np.int32))
        assert kept(states, [5], 4) == ([] if lost else [20, 21, 22, 23])


def test_the_least_recently_used_block_loses_its_place() -> None:
    states = filled(2, 5, 2)
    assert len(kept(states, [5], 4)) == 4
    slots = np.array([28], np.int32)
    states.keep(slots, states_of(slots))
    assert (kept(states, [7], 1), kept(states, [2], 4), kept(states, [5], 4)) == ([28], [], [20, 21, 22, 23])


def test_a_step_may_have_more_blocks_than_there_are_places() -> None:
    states, slots = filled(2, 5), np.arange(0, 16, dtype=np.int32)
    states.keep(slots, states_of(slots))
    found = [kept(states, [block], 4) for block in range(4)]
    assert sorted(map(len, found)) == [0, 0, 4, 4]
    assert all(each in ([], [*range(4 * block, 4 * block + 4)]) for block, each in enumerate(found))
