"""Rows of stored matrices that form a weight without a copy."""

import ctypes

import numpy as np
import pytest
from llm_serving.kernels import library
from llm_serving.network.weights import RowStack
from support.kernel_calls import Typed, typed


def parts() -> list[np.ndarray]:
    numbers = np.arange(1, 61, dtype=np.float32).reshape(6, 10)
    return [numbers[:2], numbers[2:5], numbers[5:]]


@pytest.mark.parametrize("order", [None, [5, 0, -1, 3, 3]])
def test_row_stack_addresses_are_those_of_its_assembled_rows(order: list[int] | None) -> None:
    rows = RowStack(parts(), order)
    addresses, zeros = rows.addresses()
    read = [np.frombuffer(ctypes.string_at(int(address), 40), np.float32) for address in addresses]
    assert np.array_equal(read, rows.assembled())
    assert rows.shape == rows.assembled().shape
    assert not zeros.any()


def test_row_stack_of_reordered_rows_holds_zeros_for_minus_one() -> None:
    stacked = np.concatenate(parts())
    expected = np.stack([stacked[5], stacked[0], np.zeros(10, np.float32)])
    assert np.array_equal(RowStack(parts(), [5, 0, -1]).assembled(), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (40, 70), (17, 33), (33, 128)])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1.0])
def test_pack_weight_reports_a_non_finite_element_anywhere(dtype: str, shape: tuple[int, int], value: float) -> None:
    rng = np.random.default_rng(3)
    for row, column in [(0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, shape[1] // 3)]:
        values = rng.normal(size=shape).astype(np.float32)
        values[row, column] = value
        assert _pack(typed(values, dtype)) == (0 if value == 1.0 else 2)


def _pack(weight: Typed) -> int:
    rows, _ = RowStack([weight.array]).addresses()
    target = np.empty_like(weight.array)
    kernels = library.load()
    status = kernels.llm_pack_weight(rows.ctypes.data, target.ctypes.data, weight.dtype.encode(), *weight.array.shape)
    kernels.llm_release_weight(target.ctypes.data)
    return int(status)
