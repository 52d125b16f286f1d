"""PagedAttention over one cache of latent keys, whose first elements are the values (`mla_v_dim`)."""

import numpy as np
import pytest
from llm_serving.kernels import library
from support.kernel_calls import (
    FLOAT_TYPES,
    ROUNDING_UNIT,
    Array,
    Typed,
    assert_close,
    call,
    empty,
    integers,
    scalar,
    status_of,
    typed,
)
from support.kernels import reference
from support.kernels_cache import SCALE, Cache, causal_mask, padded, rows

HEADS, KEY, VALUE = 3, 80, 48
TABLES, QUERY_LENS, CONTEXT_LENS = [[5, 3, 17, 9, 11, 2, 4], [20, 1], [7]], [5, 1, 2], [100, 30, 2]


def stored(cache: Cache, k: Typed, slots: list[int]) -> None:
    call("ReshapeAndCache", k, None, cache.key, None, integers(slots), empty(k.array.shape, cache.dtype))
    at = np.array(slots)
    cache.expected_key[at // cache.block_size, at % cache.block_size, 0] = k.values


def filled_cache(dtype: str, block_size: int = 16, garbage: float = 0.0) -> Cache:
    rng = np.random.default_rng(1)
    cache = Cache(dtype, block_size=block_size, num_kv_heads=1, head_dim=KEY)
    cache.key.array[...] = typed(np.full(cache.key.array.shape, garbage), dtype).array
    for table, length in zip(TABLES, CONTEXT_LENS, strict=True):
        stored(cache, rows(rng, length, KEY, dtype), cache.slots(table, 0, length))
    return cache


def status(cache: Cache, q: Typed, y: Typed, mask: Array, width: int = VALUE, kv_heads: int = 1) -> int:
    numbers = [kv_heads, 0, 0, width]
    settings = [scalar(HEADS, "int64"), scalar(SCALE, "float32"), *(scalar(n, "int64") for n in numbers)]
    lengths = integers(CONTEXT_LENS), None, None, typed(mask, cache.dtype), integers(QUERY_LENS), None
    return status_of("PagedAttention", q, cache.key, cache.key, padded(TABLES), *lengths, *settings, y)


def attend(cache: Cache, q: Typed, mask: Array, width: int = VALUE) -> Typed:
    y = empty((len(q.array), HEADS * width), cache.dtype)
    assert status(cache, q, y, mask, width) == 0, library.last_error()
    return y


def expected(cache: Cache, q: Typed, mask: Array | None, width: int = VALUE) -> Array:
    values = np.where(np.arange(KEY) < width, cache.expected_key, 0.0)
    tables = np.array([table + [0] * (7 - len(table)) for table in TABLES])
    found = reference.attention(
        q.values, cache.expected_key, values, tables, QUERY_LENS, CONTEXT_LENS, SCALE, mask=mask
    )
    return found.reshape(-1, HEADS, KEY)[:, :, :width].reshape(len(found), -1)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize(("block_size", "width"), [(16, VALUE), (32, VALUE), (16, 16), (16, KEY)])
def test_latent_attention_equals_the_reference_up_to_rounding(
    isa: str, dtype: str, block_size: int, width: int
) -> None:
    cache = filled_cache(dtype, block_size)
    q = rows(np.random.default_rng(2), sum(QUERY_LENS), HEADS * KEY, dtype)
    y = attend(cache, q, causal_mask(QUERY_LENS, CONTEXT_LENS, max(CONTEXT_LENS)), width)
    assert_close(y, expected(cache, q, None, width), 4 * ROUNDING_UNIT[dtype] + 1e-5)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("width", [VALUE, KEY])
def test_latent_attention_follows_its_mask(dtype: str, width: int) -> None:
    cache, rng = filled_cache(dtype), np.random.default_rng(3)
    q = rows(rng, sum(QUERY_LENS), HEADS * KEY, dtype)
    mask = np.where(rng.random((sum(QUERY_LENS), max(CONTEXT_LENS))) < 0.5, -10000.0, 0.0)
    mask[:, 0] = 0.0
    y = attend(cache, q, mask, width)
    assert_close(y, expected(cache, q, mask, width), 4 * ROUNDING_UNIT[dtype] + 1e-5)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_latent_attention_never_reads_beyond_the_context(isa: str, dtype: str) -> None:
    q = rows(np.random.default_rng(4), sum(QUERY_LENS), HEADS * KEY, dtype)
    mask = causal_mask(QUERY_LENS, CONTEXT_LENS, max(CONTEXT_LENS))
    clean, dirty = (attend(filled_cache(dtype, garbage=each), q, mask) for each in (0.0, np.nan))
    assert np.array_equal(clean.bits, dirty.bits)


@pytest.mark.parametrize(
    ("width", "columns", "message"),
    [
        (40, HEADS * VALUE, "caches must be"),
        (96, HEADS * VALUE, "caches must be"),
        (VALUE, HEADS * KEY, "rows of y must hold 3 heads of 48 elements"),
    ],
)
def test_latent_attention_refuses_a_width_that_does_not_fit(width: int, columns: int, message: str) -> None:
    cache = filled_cache("float16")
    q = rows(np.random.default_rng(5), sum(QUERY_LENS), HEADS * KEY, "float16")
    mask = causal_mask(QUERY_LENS, CONTEXT_LENS, max(CONTEXT_LENS))
    assert status(cache, q, empty((len(q.array), columns), "float16"), mask, width) != 0
    assert library.last_error().startswith(f"PagedAttention: {message}")


def test_latent_attention_refuses_caches_of_other_heads_or_axes() -> None:
    cache = filled_cache("float16")
    q = rows(np.random.default_rng(5), sum(QUERY_LENS), HEADS * KEY, "float16")
    mask, y = causal_mask(QUERY_LENS, CONTEXT_LENS, max(CONTEXT_LENS)), empty((len(q.array), HEADS * VALUE), "float16")
    assert status(cache, q, y, mask, kv_heads=2) != 0
    assert library.last_error() == "PagedAttention: kv_head_num does not fit the cache"
    cache.key = Typed(cache.key.array.reshape(-1), "float16")
    assert status(cache, q, y, mask) != 0
    assert library.last_error().startswith("PagedAttention: caches must be")


def test_latent_keys_are_stored_in_their_slots_only() -> None:
    cache = Cache("bfloat16", num_blocks=3, num_kv_heads=1, head_dim=KEY)
    k = rows(np.random.default_rng(6), 3, KEY, "bfloat16")
    call("ReshapeAndCache", k, None, cache.key, None, integers([17, -1, 47]), empty(k.array.shape, "bfloat16"))
    assert np.count_nonzero(cache.key.bits) == np.count_nonzero(k.bits[[0, 2]])
