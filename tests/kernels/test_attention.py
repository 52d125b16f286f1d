from dataclasses import dataclass

import numpy as np
import pytest
from kernel_calls import (
    FLOAT32_UNIT,
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
from llm_serving.kernels import library, reference

SCALE = 0.2


@dataclass
class Cache:
    """A cache of the library and the same content as the reference holds it."""

    dtype: str
    num_blocks: int = 24
    block_size: int = 16
    num_kv_heads: int = 2
    head_dim: int = 32

    def __post_init__(self) -> None:
        shape = (self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        self.key, self.value = (typed(np.zeros(shape), self.dtype), typed(np.zeros(shape), self.dtype))
        self.expected_key, self.expected_value = np.zeros(shape), np.zeros(shape)

    def slots(self, blocks: list[int], first: int, last: int) -> list[int]:
        return [blocks[i // self.block_size] * self.block_size + i % self.block_size for i in range(first, last)]

    def store(self, k: Typed, v: Typed, slots: list[int]) -> None:
        call("ReshapeAndCache", k, v, self.key, self.value, integers(slots), empty(k.array.shape, self.dtype))
        reference.store_kv(k.values, v.values, self.expected_key, self.expected_value, np.array(slots))

    def attend(self, q: Typed, tables: list[list[int]], query_lens: list[int], context_lens: list[int]) -> Typed:
        y = empty(q.array.shape, self.dtype)
        assert self.status(q, tables, query_lens, context_lens, y) == 0, library.last_error()
        return y

    def status(
        self, q: Typed, tables: list[list[int]], query_lens: list[int] | None, context_lens: list[int], y: Typed
    ) -> int:
        num_heads = q.array.shape[1] // self.head_dim
        width = max(map(len, tables))
        padded = integers([table + [0] * (width - len(table)) for table in tables])
        modes = [scalar(0, "int64")] * 3
        return status_of(
            "PagedAttention",
            *(q, self.key, self.value, padded, integers(context_lens), None, None, None),
            *(None if query_lens is None else integers(query_lens), None),
            *(scalar(num_heads, "int64"), scalar(SCALE, "float32"), scalar(self.num_kv_heads, "int64"), *modes, y),
        )


def rows(rng: np.random.Generator, count: int, width: int, dtype: str) -> Typed:
    return typed(rng.standard_normal((count, width)), dtype)


def filled(rng: np.random.Generator, cache: Cache, blocks: list[int], length: int) -> None:
    width = cache.num_kv_heads * cache.head_dim
    k, v = rows(rng, length, width, cache.dtype), rows(rng, length, width, cache.dtype)
    cache.store(k, v, cache.slots(blocks, 0, length))


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
    [(1, 1, 16, 16), (8, 2, 64, 16), (6, 2, 48, 32), (4, 4, 80, 16), (56, 1, 16, 16), (2, 1, 144, 16)],
)
def test_mixed_batch_is_the_reference_up_to_rounding(
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
def test_bits_of_a_position_do_not_depend_on_how_it_was_reached(isa: str, dtype: str) -> None:
    rng = np.random.default_rng(2)
    length, num_heads = 150, 4
    widths = {"q": num_heads * 32, "k": 64, "v": 64}
    q, k, v = (rows(rng, length, width, dtype) for width in widths.values())

    def computed(blocks: list[int], cuts: list[int], threads: int, noise: float) -> Array:
        """The request in chunks that end at `cuts`, in a cache of old content, beside another request."""
        cache = Cache(dtype)
        for tensor in (cache.key, cache.value):
            tensor.array[...] = typed(np.full(tensor.array.shape, noise), dtype).array
        filled(rng, cache, [22, 23], 20)
        results = []
        with library.threads_in_use(threads):
            for first, last in zip([0, *cuts], [*cuts, length], strict=True):
                part = slice(first, last)
                cache.store(k.rows(part), v.rows(part), cache.slots(blocks, first, last))
                beside = rows(rng, 3, num_heads * 32, dtype)
                both = Typed(np.concatenate([beside.array, q.array[part]]), dtype)
                y = cache.attend(both, [[22, 23], blocks], [3, last - first], [20, last])
                results.append(y.bits[3:])
        return np.concatenate(results)

    in_order, scattered = list(range(10)), [19, 2, 7, 21, 0, 13, 5, 11, 16, 4]
    whole = computed(in_order, [], 1, 0.0)
    for blocks in (in_order, scattered):
        for threads in (1, 2):
            for cuts in ([], [1], [64], [7, 16, 80, 81, 128, 149], list(range(1, length))):
                assert np.array_equal(computed(blocks, cuts, threads, 3.0), whole), (blocks, threads, cuts)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("garbage", [np.inf, -np.inf, np.nan])
def test_content_behind_the_context_is_never_read(isa: str, dtype: str, garbage: float) -> None:
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
def test_later_infinity_does_not_reach_earlier_rows(isa: str, dtype: str) -> None:
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
def test_scores_of_minus_infinity_have_no_weight(isa: str, dtype: str) -> None:
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
def test_one_key_far_above_the_others_decides(isa: str, dtype: str) -> None:
    cache = Cache(dtype, num_kv_heads=1, head_dim=16)
    rng = np.random.default_rng(5)
    k, v = np.zeros((200, 16)), rng.standard_normal((200, 16))
    k[130, 0] = 240.0
    q = np.zeros((1, 16))
    q[0, 0] = 240.0
    blocks = list(range(13))
    values = typed(v, dtype)
    cache.store(typed(k, dtype), values, cache.slots(blocks, 0, 200))
    assert np.array_equal(cache.attend(typed(q, dtype), [blocks], [1], [200]).bits[0], values.bits[130])


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_store_writes_its_slots_and_nothing_else(dtype: str) -> None:
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
def test_slots_outside_the_cache_are_an_error_and_write_nothing(slot: int) -> None:
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
def test_batches_that_do_not_fit_the_cache_are_refused(
    tables: list[list[int]], query_lens: list[int], context_lens: list[int], message: str
) -> None:
    cache = Cache("bfloat16")
    q = typed(np.ones((2, 128)), "bfloat16")
    assert cache.status(q, tables, query_lens, context_lens, empty((2, 128), "bfloat16")) != 0
    assert library.last_error() == f"PagedAttention: {message}"


def test_without_query_lens_each_request_has_one_row() -> None:
    rng = np.random.default_rng(7)
    cache = Cache("bfloat16")
    filled(rng, cache, [1, 2], 20)
    filled(rng, cache, [3], 9)
    q, y = rows(rng, 2, 128, "bfloat16"), empty((2, 128), "bfloat16")
    assert cache.status(q, [[1, 2], [3]], None, [20, 9], y) == 0
    assert np.array_equal(y.bits, cache.attend(q, [[1, 2], [3]], [1, 1], [20, 9]).bits)


def test_requests_without_rows_are_passed_over() -> None:
    rng = np.random.default_rng(8)
    cache = Cache("bfloat16")
    filled(rng, cache, [1], 9)
    q = rows(rng, 1, 128, "bfloat16")
    y = cache.attend(q, [[0], [1], [0]], [0, 1, 0], [0, 9, 5])
    assert np.array_equal(y.bits, cache.attend(q, [[1]], [1], [9]).bits)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("head_dim", [16, 48, 64])
def test_attention_of_qkv_has_the_bits_of_its_four_parts(isa: str, dtype: str, head_dim: int) -> None:
    rng = np.random.default_rng(9)
    num_heads, num_kv_heads, lens, context_lens = 4, 2, [70, 1, 9], [70, 33, 20]
    blocks, count = [[3, 1, 4, 7, 5], [9, 2, 6], [8, 0]], sum([70, 1, 9])
    q_width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
    qkv = rows(rng, count, q_width + 2 * kv_width, dtype)
    q, k, v = (
        Typed(np.ascontiguousarray(part), dtype) for part in np.split(qkv.array, [q_width, q_width + kv_width], axis=1)
    )
    cos, sin = rows(rng, count, head_dim, dtype), rows(rng, count, head_dim, dtype)
    apart, together = (Cache(dtype, head_dim=head_dim) for _ in range(2))
    slots: list[int] = []
    for table, length, context in zip(blocks, lens, context_lens, strict=True):
        slots += apart.slots(table, context - length, context)
        before = [rows(rng, context - length, kv_width, dtype) for _ in range(2)]
        for cache in (apart, together) if context > length else ():
            cache.store(*before, cache.slots(table, 0, context - length))
    slots[3] = -1
    turned_q, turned_k = empty(q.array.shape, dtype), empty(k.array.shape, dtype)
    call("ApplyRotaryPosEmb", q, k, cos, sin, integers([1]), scalar(2, "int64"), turned_q, turned_k)
    apart.store(turned_k, v, slots)
    expected = apart.attend(turned_q, blocks, lens, context_lens)
    y = empty(q.array.shape, dtype)
    tables = integers([table + [0] * (5 - len(table)) for table in blocks])
    parameters = (integers(slots), tables, integers(lens), integers(context_lens), typed([SCALE], "float32"), y)
    for threads in (1, 2):
        with library.threads_in_use(threads):
            call("attention_of_qkv", qkv, cos, sin, together.key, together.value, *parameters)
        assert np.array_equal(y.bits, expected.bits)
        assert np.array_equal(together.key.bits, apart.key.bits)
        assert np.array_equal(together.value.bits, apart.value.bits)


def test_attention_of_qkv_refuses_what_does_not_fit_and_writes_nothing() -> None:
    cache = Cache("bfloat16")
    tables, length, context = integers([[0]]), integers([2]), integers([2])
    cos = typed(np.ones((2, 32)), "bfloat16")

    def refused(qkv_width: int, slots: list[int], cos: Typed, context: Typed) -> str:
        qkv, y = typed(np.ones((2, qkv_width)), "bfloat16"), empty((2, 64), "bfloat16")
        parameters = (integers(slots), tables, length, context, typed([SCALE], "float32"), y)
        assert status_of("attention_of_qkv", qkv, cos, cos, cache.key, cache.value, *parameters) != 0
        assert not cache.key.bits.any() and not cache.value.bits.any()
        return library.last_error().removeprefix("attention_of_qkv: ")

    assert refused(96, [0, 1], cos, context) == "qkv must have 2 rows of queries and of 64 keys and values"
    assert refused(192, [0, 384], cos, context) == "slot_mapping[1] = 384 is outside the 384 slots of the cache"
    wrong = typed(np.ones((2, 16)), "bfloat16")
    message = "cos and sin must have 2 rows of 32 elements of the type of qkv"
    assert refused(192, [0, 1], wrong, context) == message
    assert refused(192, [0, 1], cos, integers([17])) == "request 0 needs 2 blocks, its table has 1"
