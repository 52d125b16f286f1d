"""The checks of a step's arrays, against those of plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_serving.worker.model_inputs import are_below, are_zero, cut, everywhere, somewhere

INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(st.integers(-3, 6) | INT32, max_size=5), st.sampled_from([1, 4, 6, 2**31 - 1, 2**31]))
def test_numbers_are_below_an_end(values, end):
    assert are_below(np.array(values, np.int32), end) == all(0 <= each < end for each in values)


@pytest.mark.parametrize("values", [[[0, 3], [1, 2]], [[0, 3], [-1, 2]], [[4, 0], [0, 0]]])
def test_so_are_those_of_a_column(values):
    found = [are_below(column, 4) for column in np.array(values, np.int32).T]
    assert found == [all(0 <= each < 4 for each in column) for column in zip(*values, strict=True)]


@given(st.lists(st.integers(-2, 4), max_size=5), st.integers(0, 4), st.integers(0, 4))
def test_offsets_cut_a_list(offsets, num_entries, num_parts):
    ends = len(offsets) == num_parts + 1 and offsets[0] == 0 and offsets[-1] == num_entries
    assert cut(np.array(offsets, np.int32), num_entries, num_parts) == (ends and sorted(offsets) == offsets)


@given(st.lists(st.booleans(), max_size=5))
def test_masks_are_true_everywhere_or_somewhere(values):
    mask = np.array(values, np.bool_)
    assert everywhere(mask) == all(values)
    assert somewhere(mask) == any(values)


@given(st.lists(st.sampled_from([0, 1, 256, -(2**31)]), max_size=4), st.sampled_from([np.int32, np.float64]))
def test_numbers_are_zero(values, dtype):
    assert are_zero(np.array(values, dtype)) == (not any(values))
