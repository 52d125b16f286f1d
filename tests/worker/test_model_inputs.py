"""Network arguments built from steps, and the checks of their arrays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_serving.core.step import NO_BLOCK
from llm_serving.core.window import ONE_GROUP, CacheGroups, Window
from llm_serving.errors import WorkerError
from llm_serving.worker.model_inputs import (
    NO_TOKENS,
    ModelLimits,
    all_in_range,
    all_true,
    all_zero,
    any_true,
    build_model_inputs,
    is_partition,
    resolve_token_ids,
)
from msgspec import structs
from support.step_factories import sampling_input, step_input

LIMITS = ModelLimits(vocab_size=100, max_positions=64, num_blocks=10, block_size=4)


def build(step, previous=NO_TOKENS, limits=LIMITS):
    return build_model_inputs(step, previous, limits)


def test_a_prompt_chunk_and_a_decode_row_share_a_step():
    inputs = build(step_input([([11, 12, 13], 3, [7, 2]), ([21], 8, [1, 5, 9])]))
    assert inputs.token_ids.tolist() == [11, 12, 13, 21]
    assert inputs.positions.tolist() == [3, 4, 5, 8]
    assert inputs.slot_mapping.tolist() == [7 * 4 + 3, 2 * 4 + 0, 2 * 4 + 1, 9 * 4 + 0]
    assert inputs.block_tables.tolist() == [[7, 2, 0], [1, 5, 9]]
    assert inputs.query_lens.tolist() == [3, 1]
    assert inputs.context_lens.tolist() == [6, 9]
    assert inputs.sample_indices.tolist() == [2, 3]


def test_model_inputs_of_a_step_with_decode_rows_only():
    inputs = build(step_input([([1], 0, [3]), ([2], 5, [4, 6])]))
    assert inputs.positions.tolist() == [0, 5]
    assert inputs.slot_mapping.tolist() == [12, 25]
    assert inputs.context_lens.tolist() == [1, 6]
    assert inputs.sample_indices.tolist() == [0, 1]


def test_only_the_last_tokens_of_sampling_rows_are_sampled():
    rows = [([1, 2], 0, [1]), ([3], 0, [2]), ([4, 5, 6], 0, [3])]
    assert build(step_input(rows, samples=[0, 2])).sample_indices.tolist() == [1, 5]
    assert build(step_input(rows, samples=[])).sample_indices.tolist() == []


def test_model_inputs_are_int32_and_contiguous():
    for rows in ([([1], 0, [3]), ([2], 5, [4, 6])], [([1, 2], 0, [3])]):
        for array in build(step_input(rows)).arrays():
            assert array.dtype == np.int32
            assert array.flags.c_contiguous


def test_padded_rows_have_no_tokens():
    inputs = build(step_input([([11, 12, 13], 0, [7]), ([21], 0, [1])]))
    assert inputs.are_whole_prompts
    padded = inputs.padded_to(4)
    assert padded.query_lens.tolist() == padded.context_lens.tolist() == [3, 1, 0, 0]
    assert padded.block_tables.tolist() == [[7], [1], [0], [0]]
    for name in ("token_ids", "positions", "slot_mapping", "sample_indices"):
        assert np.array_equal(getattr(padded, name), getattr(inputs, name))
    assert all(array.dtype == np.int32 for array in padded.arrays())
    assert not build(step_input([([11, 12, 13], 0, [7]), ([21], 1, [1])])).are_whole_prompts


def test_token_rows_contain_one_token_each():
    inputs = build(step_input([([11, 12, 13], 1, [7]), ([21], 0, [1])]))
    planned = inputs.with_token_rows(3)
    assert planned.query_lens.tolist() == [1, 1, 1, 1, 0, 0]
    assert planned.context_lens.tolist() == [2, 3, 4, 1, 0, 0]
    assert planned.block_tables.tolist() == [[7], [7], [7], [1], [0], [0]]
    for name in ("token_ids", "positions", "slot_mapping", "sample_indices"):
        assert np.array_equal(getattr(planned, name), getattr(inputs, name))
    assert all(array.dtype == np.int32 for array in planned.arrays())


def test_references_resolve_to_tokens_of_the_previous_step():
    inputs = build(step_input([([-2], 3, [1]), ([5], 0, [2]), ([-1], 0, [3])]), previous=np.array([40, 41], np.int32))
    assert inputs.token_ids.tolist() == [41, 5, 40]


def test_a_reference_to_a_failed_sample_stands_for_any_token():
    assert resolve_token_ids(np.array([-1, -2], np.int32), np.array([-1, 9], np.int32)).tolist() == [0, 9]


def test_resolving_references_does_not_change_the_step():
    token_ids = np.array([-1, 3], np.int32)
    resolve_token_ids(token_ids, np.array([8], np.int32))
    assert token_ids.tolist() == [-1, 3]


def test_a_reference_past_the_previous_step_is_an_error():
    with pytest.raises(WorkerError, match="refers to sample 2 of the previous step, which chose 2 tokens"):
        build(step_input([([-3], 0, [1])]), previous=np.array([1, 2], np.int32))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([([100], 0, [1])], "token_ids must be below 100. Given: 100"),
        ([([1], 0, [10])], "block_tables must hold ids from 0 to 9. Given: 10 to 10"),
        ([([1], 0, [-1])], "block_tables must hold ids from 0 to 9. Given: -1 to -1"),
        ([([1], 4, [1])], "block_tables has 1 columns of 4 tokens, too few for a row of 5 tokens"),
        ([([1], 64, list(range(10)) * 2)], "at most 64 tokens. Given: 65"),
        ([([1], 0, [3]), ([1], 0, [-(2**31)])], "block_tables must hold ids from 0 to 9. Given: -2147483648 to 3"),
        ([([1], -1, [1])], "num_computed must be from 0 to 64. Given: -1 to -1"),
        ([([1], 2**31 - 1, [1])], "num_computed must be from 0 to 64"),
        ([([], 0, [1]), ([1, 2], 0, [2])], "query_lens must be at least 1 each and 2 together. Given: least 0, sum 2"),
    ],
)
def test_out_of_range_indices_are_rejected(rows, message):
    with pytest.raises(WorkerError, match=message):
        build(step_input(rows))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_lens": np.array([2, 2], np.int32)}, "3 together. Given: least 2, sum 4"),
        (
            {"num_computed": np.array([0], np.int32)},
            "one entry for each of 2 rows, .* Given: num_computed 1, block_tables 2",
        ),
        (
            {"result_tokens": np.array([[1, 0, 0], [0, 1, 0]], np.int32)},
            "result_tokens must ascend by kind, row and token",
        ),
        (
            {"result_tokens": np.array([[0, 1, 0], [0, 1, 0]], np.int32)},
            "result_tokens must ascend by kind, row and token",
        ),
        (
            {"result_tokens": np.array([[0, 1, 1], [1, 0, 0]], np.int32)},
            "result_tokens must ascend by kind, row and token",
        ),
        (
            {"result_tokens": np.array([[0, 1, 0], [2, 0, 0]], np.int32)},
            "result_tokens must have rows 0 to 1. Given: 0 to 2",
        ),
        (
            {"result_tokens": np.array([[0, 2, 0], [1, 0, 0]], np.int32)},
            "the token positions in result_tokens must be less than `query_lens` of their rows",
        ),
        (
            {"result_tokens": np.array([[0, -1, 0], [1, 0, 0]], np.int32)},
            "the token positions in result_tokens must be less than `query_lens` of their rows",
        ),
        (
            {"result_tokens": np.array([[0, 1, 0], [1, 0, 4]], np.int32)},
            "result_tokens must have kinds 0 to 3. Given: 0 to 4",
        ),
        (
            {"result_tokens": np.array([[0, 1, -1], [1, 0, 0]], np.int32)},
            "result_tokens must have kinds 0 to 3. Given: -1 to 0",
        ),
        (
            {"result_tokens": np.array([[-1, 0, 0], [1, 0, 0]], np.int32)},
            "result_tokens must have rows 0 to 1. Given: -1 to 1",
        ),
        (
            {"result_tokens": np.array([[0, 1], [1, 0]], np.int32)},
            r"result_tokens must be an array of row, token, kind",
        ),
        (
            {"result_tokens": np.array([[0, 1, 0], [1, 0, 1]], np.int32)},
            r"sampling must describe 1 results and scoring 1, .* Given: sampling 2, scoring 0",
        ),
        (
            {"sampling": sampling_input(1)},
            r"sampling must describe 2 results and scoring 0, .* Given: sampling 1, scoring 0",
        ),
        ({"query_lens": np.array([], np.int32)}, "at least one row"),
    ],
)
def test_an_inconsistent_step_is_rejected(changes, message):
    step = step_input([([1, 2], 0, [1]), ([3], 0, [2])])
    with pytest.raises(WorkerError, match=message):
        build(structs.replace(step, **changes))


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=6),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_indices_equal_those_of_a_loop_over_tokens(lengths, block_size, random):
    limits = ModelLimits(100, 64, 500, block_size)
    rows = []
    for query_len, num_computed in lengths:
        num_blocks = -(-(query_len + num_computed) // block_size)
        rows.append(
            ([random.randrange(100) for _ in range(query_len)], num_computed, random.sample(range(500), num_blocks))
        )
    positions, slots = [], []
    for token_ids, num_computed, blocks in rows:
        for position in range(num_computed, num_computed + len(token_ids)):
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
    inputs = build(step_input(rows), limits=limits)
    assert inputs.positions.tolist() == positions
    assert inputs.slot_mapping.tolist() == slots


def test_blocks_behind_the_window_may_be_missing():
    """With a window of 6, the token at position 9 attends to positions from 4 on, and that at 12 from 7 on, in the same
    block.
    """
    limits = dataclasses.replace(LIMITS, groups=CacheGroups((Window(6),)))
    rows = [([5], 9, [NO_BLOCK, 3, 6]), ([7, 8], 12, [NO_BLOCK, 5, 1, 2])]
    inputs = build(step_input(rows), limits=limits)
    assert inputs.block_tables.tolist() == [[0, 3, 6, 0], [0, 5, 1, 2]]
    assert inputs.slot_mapping.tolist() == [6 * 4 + 1, 2 * 4, 2 * 4 + 1]


@pytest.mark.parametrize(("table", "window"), [([NO_BLOCK, NO_BLOCK, 6], 6), ([-2, 3, 6], 6), ([NO_BLOCK, 3, 6], None)])
def test_a_missing_block_inside_the_window_is_rejected(table, window):
    groups = CacheGroups((Window(window),)) if window else ONE_GROUP
    with pytest.raises(WorkerError, match="block_tables must hold ids from 0 to 9"):
        build(step_input([([5], 9, table)]), limits=dataclasses.replace(LIMITS, groups=groups))


INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(st.integers(-3, 6) | INT32, max_size=5), st.sampled_from([1, 4, 6, 2**31 - 1, 2**31]))
def test_all_in_range_equals_a_python_loop(values, end):
    assert all_in_range(np.array(values, np.int32), end) == all(0 <= each < end for each in values)


@pytest.mark.parametrize("values", [[[0, 3], [1, 2]], [[0, 3], [-1, 2]], [[4, 0], [0, 0]]])
def test_all_in_range_accepts_strided_columns(values):
    found = [all_in_range(column, 4) for column in np.array(values, np.int32).T]
    assert found == [all(0 <= each < 4 for each in column) for column in zip(*values, strict=True)]


@given(st.lists(st.integers(-2, 4), max_size=5), st.integers(0, 4), st.integers(0, 4))
def test_is_partition_equals_its_definition(offsets, num_entries, num_parts):
    ends = len(offsets) == num_parts + 1 and offsets[0] == 0 and offsets[-1] == num_entries
    assert is_partition(np.array(offsets, np.int32), num_entries, num_parts) == (ends and sorted(offsets) == offsets)


@given(st.lists(st.booleans(), max_size=5))
def test_all_true_and_any_true_equal_python(values):
    mask = np.array(values, np.bool_)
    assert all_true(mask) == all(values)
    assert any_true(mask) == any(values)


@given(st.lists(st.sampled_from([0, 1, 256, -(2**31)]), max_size=4), st.sampled_from([np.int32, np.float64]))
def test_all_zero_equals_python(values, dtype):
    assert all_zero(np.array(values, dtype)) == (not any(values))


def test_each_group_of_layers_has_slots_from_its_own_tables():
    """Two rows in two groups: the second group has a window of 6 tokens, and no block before it."""
    limits = dataclasses.replace(LIMITS, groups=CacheGroups((Window(), Window(6))))
    given = step_input([([5], 9, [1, 2, 3]), ([6, 7], 3, [4, 5])])
    tables = np.array([[1, 2, 3], [4, 5, 0], [NO_BLOCK, 7, 8], [9, 6, 0]], np.int32)
    given = structs.replace(given, block_tables=tables, block_epochs=np.zeros_like(tables))
    inputs = build(given, limits=limits)
    assert inputs.slot_mapping.tolist() == [3 * 4 + 1, 4 * 4 + 3, 5 * 4, 8 * 4 + 1, 9 * 4 + 3, 6 * 4]
    assert inputs.block_tables.tolist() == [[1, 2, 3], [4, 5, 0], [0, 7, 8], [9, 6, 0]]
    with pytest.raises(WorkerError, match="block_tables 2 for each"):
        build(structs.replace(given, block_tables=tables[:2], block_epochs=tables[:2]), limits=limits)
