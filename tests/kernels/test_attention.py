import numpy as np
import pytest
from llm_serving.kernels import library
from support.kernel_calls import (
    FLOAT32_UNIT,
    FLOAT_TYPES,
    ROUNDING_UNIT,
    Array,
    Typed,
    assert_close,
    empty,
    integers,
    status_of,
    typed,
)
from support.kernels import reference
from support.kernels_cache import SCALE, Cache, filled, rows


def bound(cache: Cache, q: Typed, tables: Array, query_lens: list[int], context_lens: list[int]) -> Array:
    """How far rounding can move a result: each weight by a relative `delta`, each sum by its own rounding.

    A score is a sum of head_dim products, so it is off by at most 2 * head_dim units of its magnitude. Its exponential
    is off by that much relatively, by 8 units of its own and, where weights are kept in the type of the cache, by one
    rounding.
    """
    largest = np.abs(q.values).max() * np.abs(cache.expected_key).max() * cache.head_dim * SCALE
    score = 2 * cache.head_dim * FLOAT32_UNIT * float(largest)
    delta = np.expm1(score) + 8 * FLOAT32_UNIT + ROUNDING_UNIT[cache.dtype] + 4 * max(context_lens) * FLOAT32_UNIT
    magnitude = reference.attention(
        q.values, cache.expected_key, np.abs(cache.expected_value), tables, query_lens, context_lens, SCALE
    )
    return 2.2 * delta * magnitude


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        (1, 1, 16, 16),
        (8, 2, 64, 16),
        (6, 2, 48, 32),
        (4, 4, 80, 16),
        (56, 1, 16, 16),
        (2, 1, 144, 16),
        (4, 2, 96, 16),
        (16, 1, 128, 16),
        (2, 1, 192, 16),
        (4, 2, 256, 32),
    ],
)
def test_attention_equals_the_reference_up_to_rounding(
    isa: str, dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    rng = np.random.default_rng(1)
    cache = Cache(dtype, 24, block_size, num_kv_heads, head_dim)
    tables = [[5, 3, 17, 9, 11], [20, 1], [2, 8], [7]]
    context_lens = [4 * block_size + 7, block_size, block_size + 1, 3]
    query_lens = [1, block_size, 6, 2]
    for table, length in zip(tables, context_lens, strict=True):
        filled(rng, cache, table, length)
    q = rows(rng, sum(query_lens), num_heads * head_dim, dtype)
    padded = np.array([table + [0] * (5 - len(table)) for table in tables])
    expected = reference.attention(
        q.values, cache.expected_key, cache.expected_value, padded, query_lens, context_lens, SCALE
    )
    y = cache.attend(q, tables, query_lens, context_lens)
    assert_close(y, expected, bound(cache, q, padded, query_lens, context_lens))


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("head_dim", [32, 80])
def test_attention_bits_are_independent_of_chunking(isa: str, dtype: str, head_dim: int) -> None:
    rng = np.random.default_rng(2)
    length, num_heads = 150, 4
    widths = {"q": num_heads * head_dim, "k": 2 * head_dim, "v": 2 * head_dim}
    q, k, v = (rows(rng, length, width, dtype) for width in widths.values())

    def computed(blocks: list[int], cuts: list[int], threads: int, noise: float) -> Array:
        """The request in chunks that end at `cuts`, in a cache with old content, beside another request."""
        cache = Cache(dtype, head_dim=head_dim)
        for tensor in (cache.key, cache.value):
            tensor.array[...] = typed(np.full(tensor.array.shape, noise), dtype).array
        filled(rng, cache, [22, 23], 20)
        results = []
        with library.use_threads(threads):
            for first, last in zip([0, *cuts], [*cuts, length], strict=True):
                part = slice(first, last)
                cache.store(k.rows(part), v.rows(part), cache.slots(blocks, first, last))
                beside = rows(rng, 3, num_heads * head_dim, dtype)
                both = Typed(np.concatenate([beside.array, q.array[part]]), dtype)
                y = cache.attend(both, [[22, 23], blocks], [3, last - first], [20, last])
                results.append(y.bits[3:])
        return np.concatenate(results)

    in_order, scattered = list(range(10)), [19, 2, 7, 21, 0, 13, 5, 11, 16, 4]
    whole = computed(in_order, [], 1, 0.0)
    for blocks, threads in ((in_order, 2), (scattered, 1)):
        for cuts in ([], [1], [64], [7, 16, 80, 81, 128, 149], list(range(1, length))):
            assert np.array_equal(computed(blocks, cuts, threads, 3.0), whole), (blocks, threads, cuts)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("garbage", [np.inf, -np.inf, np.nan])
def test_attention_never_reads_beyond_the_context(isa: str, dtype: str, garbage: float) -> None:
    rng = np.random.default_rng(3)
    clean, dirty = Cache(dtype), Cache(dtype)
    for tensor in (dirty.key, dirty.value):
        tensor.array[...] = typed(np.full(tensor.array.shape, garbage), dtype).array
    k, v, q = (rows(rng, 37, 64, dtype), rows(rng, 37, 64, dtype), rows(rng, 5, 128, dtype))
    results = []
    for cache in (clean, dirty):
        cache.store(k, v, cache.slots([4, 9, 2], 0, 37))
        results.append(cache.attend(q, [[4, 9, 2]], [5], [37]).bits)
    assert np.array_equal(*results)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_attention_ignores_infinity_in_later_positions(isa: str, dtype: str) -> None:
    rng = np.random.default_rng(4)
    k, v = rng.standard_normal((2, 30, 64))
    q = rows(rng, 30, 128, dtype)
    clean, dirty = Cache(dtype), Cache(dtype)
    clean.store(typed(k, dtype), typed(v, dtype), clean.slots([1, 2], 0, 30))
    v[20, 40] = np.inf
    dirty.store(typed(k, dtype), typed(v, dtype), dirty.slots([1, 2], 0, 30))
    expected, y = (cache.attend(q, [[1, 2]], [30], [30]) for cache in (clean, dirty))
    assert np.array_equal(y.bits[:20], expected.bits[:20])
    # Head 1 of the cache serves heads 2 and 3; dim 40 is its dim 8.
    assert np.all(np.isinf(y.values[20:, [2 * 32 + 8, 3 * 32 + 8]]))
    assert np.all(np.isfinite(np.delete(y.values, [2 * 32 + 8, 3 * 32 + 8], axis=1)))


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_attention_gives_minus_infinity_scores_no_weight(isa: str, dtype: str) -> None:
    cache = Cache(dtype, num_kv_heads=1, head_dim=16)
    k, v = np.zeros((100, 16)), np.ones((100, 16))
    k[:, 0], k[99, 0], v[99] = -np.inf, 0.0, 7.0
    q = np.zeros((1, 16))
    q[0, 0] = 1.0
    blocks = list(range(7))
    cache.store(typed(k, dtype), typed(v, dtype), cache.slots(blocks, 0, 100))
    assert np.all(cache.attend(typed(q, dtype), [blocks], [1], [100]).values == 7.0)
    assert np.all(cache.attend(typed(q, dtype), [blocks], [1], [99]).values == 0.0)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("size", [240.0, 1.1e15])
def test_attention_with_one_dominant_key_returns_its_value(isa: str, dtype: str, size: float) -> None:
    size = min(size, 6e4) if dtype == "float16" else size
    cache = Cache(dtype, num_kv_heads=1, head_dim=16)
    rng = np.random.default_rng(5)
    k, v = np.zeros((200, 16)), rng.standard_normal((200, 16))
    k[130, 0] = size
    q = np.zeros((1, 16))
    q[0, 0] = size
    blocks = list(range(13))
    values = typed(v, dtype)
    cache.store(typed(k, dtype), values, cache.slots(blocks, 0, 200))
    assert np.array_equal(cache.attend(typed(q, dtype), [blocks], [1], [200]).bits[0], values.bits[130])


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_store_kv_writes_its_slots_only(dtype: str) -> None:
    rng = np.random.default_rng(6)
    cache = Cache(dtype, num_blocks=3)
    k, v = rows(rng, 3, 64, dtype), rows(rng, 3, 64, dtype)
    cache.store(k, v, [17, -1, 47])
    changed = {
        tensor: {int(i) // 1024 for i in np.flatnonzero(getattr(cache, tensor).bits)} for tensor in ("key", "value")
    }
    assert changed == {"key": {1, 2}, "value": {1, 2}}
    assert np.count_nonzero(cache.key.bits) == np.count_nonzero(k.bits[[0, 2]])
    assert np.count_nonzero(cache.value.bits) == np.count_nonzero(v.bits[[0, 2]])


@pytest.mark.parametrize("slot", [48, -2, 2**31 - 1])
def test_store_kv_refuses_slots_outside_the_cache(slot: int) -> None:
    cache = Cache("bfloat16", num_blocks=3)
    k = typed(np.ones((2, 64)), "bfloat16")
    status = status_of("ReshapeAndCache", k, k, cache.key, cache.value, integers([0, slot]), empty((2, 64), "bfloat16"))
    assert status != 0
    assert library.last_error() == f"ReshapeAndCache: slot_mapping[1] = {slot} is outside the 48 slots of the cache"
    assert not cache.key.bits.any() and not cache.value.bits.any()


@pytest.mark.parametrize(
    ("tables", "query_lens", "context_lens", "message"),
    [
        ([[0, 24]], [2], [20], "block 24 of request 0 is outside the 24 blocks of the cache"),
        ([[0, -1]], [2], [20], "block -1 of request 0 is outside the 24 blocks of the cache"),
        ([[0]], [2], [20], "request 0 needs 2 blocks, its table has 1"),
        ([[0, 1]], [3], [20], "query_lens add up to 3, q has 2 rows"),
        ([[0, 1]], [2], [1], "request 0 has 2 query rows in a context of 1"),
        ([[0, 1]], [-1], [1], "request 0 has -1 query rows in a context of 1"),
    ],
)
def test_attention_refuses_batches_beyond_the_cache(
    tables: list[list[int]], query_lens: list[int], context_lens: list[int], message: str
) -> None:
    cache = Cache("bfloat16")
    q = typed(np.ones((2, 128)), "bfloat16")
    assert cache.status(q, tables, query_lens, context_lens, empty((2, 128), "bfloat16")) != 0
    assert library.last_error() == f"PagedAttention: {message}"


def test_attention_without_query_lens_has_one_row_per_request() -> None:
    rng = np.random.default_rng(7)
    cache = Cache("bfloat16")
    filled(rng, cache, [1, 2], 20)
    filled(rng, cache, [3], 9)
    q, y = rows(rng, 2, 128, "bfloat16"), empty((2, 128), "bfloat16")
    assert cache.status(q, [[1, 2], [3]], None, [20, 9], y) == 0
    assert np.array_equal(y.bits, cache.attend(q, [[1, 2], [3]], [1, 1], [20, 9]).bits)


def test_attention_skips_requests_without_rows() -> None:
    rng = np.random.default_rng(8)
    cache = Cache("bfloat16")
    filled(rng, cache, [1], 9)
    q = rows(rng, 1, 128, "bfloat16")
    y = cache.attend(q, [[0], [1], [0]], [0, 1, 0], [0, 9, 5])
    assert np.array_equal(y.bits, cache.attend(q, [[1]], [1], [9]).bits)
