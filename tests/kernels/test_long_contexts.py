"""Contexts of several segments, which threads may share: bits are independent of the threads."""

import numpy as np
import pytest
from llm_serving.kernels import library
from support.kernel_calls import FLOAT32_UNIT, FLOAT_TYPES, ROUNDING_UNIT, Array, Typed, assert_close, typed
from support.kernels import reference
from support.kernels_cache import SCALE, Cache, filled, padded, rows

LENGTH, BLOCKS = 2100, list(range(1, 133))
NUM_HEADS, HEAD_DIM = 2, 16


def long_cache(dtype: str) -> Cache:
    """One KV head, so that a decoded row is one tile; the blocks behind belong to another request."""
    cache = Cache(dtype, num_blocks=160, num_kv_heads=1, head_dim=HEAD_DIM)
    rng = np.random.default_rng(1)
    filled(rng, cache, BLOCKS, LENGTH)
    filled(rng, cache, [150, 140, 0], 40)
    return cache


@pytest.fixture(scope="module", params=FLOAT_TYPES)
def cache(request: pytest.FixtureRequest) -> Cache:
    return long_cache(request.param)


def test_long_context_bits_are_independent_of_threads(isa: str, cache: Cache) -> None:
    """Rows on both sides of segment borders: as one prompt, and each alone, beside another and in a batch."""
    counts = {1030: 12, LENGTH: 60}
    q = rows(np.random.default_rng(2), 61, NUM_HEADS * HEAD_DIM, cache.dtype)
    for end, count in counts.items():
        with library.use_threads(1):
            whole = cache.attend(q.rows(slice(0, count)), [BLOCKS], [count], [end]).bits
        for threads in (1, 2, 5):
            with library.use_threads(threads):
                again = cache.attend(q.rows(slice(0, count)), [BLOCKS], [count], [end])
                assert np.array_equal(again.bits, whole), (threads, end)
                for row in {0, count // 2, count - 53, count - 52, count - 7, count - 1} & set(range(count)):
                    length = end - count + row + 1
                    alone = cache.attend(q.rows(slice(row, row + 1)), [BLOCKS], [1], [length])
                    assert np.array_equal(alone.bits[0], whole[row]), (threads, length)
                    beside = Typed(np.concatenate([q.array[60:], q.array[row : row + 1]]), cache.dtype)
                    both = cache.attend(beside, [[150, 140, 0], BLOCKS], [1, 1], [40, length])
                    assert np.array_equal(both.bits[1], whole[row]), (threads, length)
                    crowd = Typed(np.repeat(q.array[row : row + 1], 17, axis=0), cache.dtype)
                    many = cache.attend(crowd, [BLOCKS] * 17, [1] * 17, [length] * 17)
                    assert np.array_equal(many.bits, np.repeat(whole[row : row + 1], 17, axis=0)), (threads, length)


@pytest.mark.parametrize("threads", [1, 3])
def test_long_context_equals_the_reference_up_to_rounding(isa: str, cache: Cache, threads: int) -> None:
    q = rows(np.random.default_rng(3), 53, NUM_HEADS * HEAD_DIM, cache.dtype)
    given = padded([BLOCKS]).array, [53], [LENGTH], SCALE
    expected = reference.attention(q.values, cache.expected_key, cache.expected_value, *given)
    magnitude = reference.attention(q.values, cache.expected_key, np.abs(cache.expected_value), *given)
    # As in test_attention.py.
    score = 2 * HEAD_DIM * FLOAT32_UNIT * float(np.abs(q.values).max() * np.abs(cache.expected_key).max())
    delta = np.expm1(score * HEAD_DIM * SCALE) + 8 * FLOAT32_UNIT + ROUNDING_UNIT[cache.dtype]
    with library.use_threads(threads):
        y = cache.attend(q, [BLOCKS], [53], [LENGTH])
        last = cache.attend(q.rows(slice(52, 53)), [BLOCKS], [1], [LENGTH])
    assert_close(y, expected, 2.2 * (delta + 4 * LENGTH * FLOAT32_UNIT) * magnitude)
    assert np.array_equal(last.bits[0], y.bits[52])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("decisive", [3, 1023, 1024, 1500, 2047, 2048, 2099])
def test_long_context_with_one_dominant_key_at_any_position(isa: str, threads: int, decisive: int) -> None:
    """Segments before it lose all weight, and those behind it add none; a segment of only -inf would give NaN."""
    cache = Cache("float32", num_blocks=132, num_kv_heads=1, head_dim=16)
    k, v = np.zeros((LENGTH, 16)), np.random.default_rng(5).standard_normal((LENGTH, 16))
    k[:, 0] = -np.inf
    k[decisive, 0] = 1e4
    blocks = list(range(132))
    values = typed(v, "float32")
    cache.store(typed(k, "float32"), values, cache.slots(blocks, 0, LENGTH))
    q: Array = np.zeros((1, 16))
    q[0, 0] = 1.0
    with library.use_threads(threads):
        y = cache.attend(typed(q, "float32"), [blocks], [1], [LENGTH])
    assert np.array_equal(y.bits[0], values.bits[decisive])
