"""The NumPy references, compared with results computed by hand."""

import numpy as np
from support.kernels import reference


def test_rms_norm_divides_by_the_root_of_the_mean_square() -> None:
    assert np.allclose(reference.rms_norm(np.array([[3.0, 4.0]]), np.array([1.0, 2.0]), 0.0), [[3, 8]] / np.sqrt(12.5))


def test_reference_rotary_by_a_right_angle_swaps_the_halves() -> None:
    cos, sin = np.zeros((1, 4)), np.ones((1, 4))
    assert reference.rotary(np.array([[1.0, 2, 3, 4, 5, 6, 7, 8]]), cos, sin).tolist() == [[-3, -4, 1, 2, -7, -8, 5, 6]]


def test_reference_swiglu_has_the_gate_first() -> None:
    assert np.allclose(reference.swiglu(np.array([[0.0, 1.0, 5.0, 2.0]])), [[0, 2 / (1 + np.exp(-1))]])


def test_reference_attention_of_equal_keys_is_the_mean() -> None:
    key_cache, value_cache = np.zeros((3, 2, 1, 1)), np.arange(6.0).reshape(3, 2, 1, 1)
    y = reference.attention(np.ones((4, 2)), key_cache, value_cache, np.array([[2, 0], [1, 0]]), [3, 1], [3, 2], 1.0)
    # Request 0 reads slots 4, 5, 0 and request 1 slots 2, 3.
    assert y.tolist() == [[4, 4], [4.5, 4.5], [3, 3], [2.5, 2.5]]


def test_store_kv_skips_negative_slots() -> None:
    key_cache, value_cache = np.zeros((2, 2, 1, 1)), np.zeros((2, 2, 1, 1))
    rows = np.array([[1.0], [2.0], [3.0]])
    reference.store_kv(rows, -rows, key_cache, value_cache, np.array([3, -1, 0]))
    assert key_cache.ravel().tolist() == [3, 0, 0, 1]
    assert value_cache.ravel().tolist() == [-3, 0, 0, -1]
