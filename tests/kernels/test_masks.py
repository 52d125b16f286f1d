"""Attention follows its mask, in PagedAttention and in FlashAttentionScore, causal or not."""

import numpy as np
import pytest
from llm_serving.kernels import library
from support.kernel_calls import (
    FLOAT_TYPES,
    ROUNDING_UNIT,
    Array,
    Typed,
    assert_close,
    empty,
    integers,
    scalar,
    status_of,
    typed,
)
from support.kernels import reference
from support.kernels_cache import SCALE, TRAPEZOIDAL, Cache, causal_mask, filled, rows

MASKED = -10000.0
HEADS, KV_HEADS, DIM = 4, 2, 32
TH = 5


def tile(dtype: str, kept: Array) -> Typed:
    """A mask of FlashAttentionScore, set for hidden keys: 1 in bfloat16, -10,000 in other types."""
    return typed(np.where(kept, 0.0, 1.0 if dtype == "bfloat16" else MASKED), dtype)


CAUSAL = np.tri(128, dtype=bool)


def flash(
    q: Typed,
    k: Typed,
    v: Typed,
    mask: Typed | None,
    lens: list[int],
    y: Typed,
    key_lens: list[int] | None = None,
    layout: int = TH,
) -> int:
    """Status of FlashAttentionScore."""
    lengths = [integers(each, "int64") for each in (lens, lens if key_lens is None else key_lens)]
    unused = [empty((1,), "float32") for _ in range(3)]
    return status_of(
        *("FlashAttentionScore", q, k, v, None, None, None, mask, None, *lengths, scalar(HEADS, "int64")),
        *(scalar(1.0, "float32"), scalar(SCALE, "float32"), scalar(2**31 - 1, "int64"), scalar(2**31 - 1, "int64")),
        *(scalar(0, "int64"), scalar(layout, "int64"), scalar(0, "int64"), *unused, y),
    )


def prompts(dtype: str, total: int) -> tuple[Typed, Typed, Typed]:
    rng = np.random.default_rng(11)
    return tuple(rows(rng, total, heads * DIM, dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))


def off_by(dtype: str) -> float:
    """Weights kept in the type, and sums of a few hundred terms of about 1."""
    return 4 * ROUNDING_UNIT[dtype] + 1e-5


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("lens", [[1], [70, 0, 1, 16], [140, 17, 0, 0]])
def test_causal_mask_equals_paged_attention_bit_for_bit(isa: str, dtype: str, lens: list[int]) -> None:
    q, k, v = prompts(dtype, sum(lens))
    y = empty(q.array.shape, dtype)
    assert flash(q, k, v, tile(dtype, CAUSAL), lens, y) == 0, library.last_error()
    exact = reference.prompt_attention(q.values, k.values, v.values, lens, HEADS, SCALE, np.where(CAUSAL, 0, -np.inf))
    assert_close(y, exact, off_by(dtype))
    cache = Cache(dtype, num_kv_heads=KV_HEADS, head_dim=DIM)
    start, block, tables = 0, 0, []
    for length in lens:
        tables.append(list(range(block, block + max(1, -(-length // 16)))))
        part = slice(start, start + length)
        cache.store(k.rows(part), v.rows(part), cache.slots(tables[-1], 0, length))
        start, block = start + length, block + len(tables[-1])
    assert np.array_equal(y.bits, cache.attend(q, tables, lens, lens).bits)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("kind", ["none", "empty", "window", "upper", "half"])
def test_prompt_attention_follows_its_mask(dtype: str, kind: str) -> None:
    lens = [150, 9]
    q, k, v = prompts(dtype, sum(lens))
    distance = np.arange(128)[:, None] - np.arange(128)
    kept = {"window": (distance >= 0) & (distance < 5), "upper": distance <= 0}.get(kind, np.ones((128, 128), bool))
    mask, added = tile(dtype, kept), np.where(kept, 0.0, -np.inf)
    if kind == "half":  # takes something off and hides nothing
        factor = MASKED if dtype == "bfloat16" else 1.0
        mask = typed(np.where(CAUSAL, 0.0, -0.5 / MASKED if dtype == "bfloat16" else -0.5), dtype)
        added = factor * mask.values.astype(np.float64)
    if kind == "none":
        mask, added = None, None
    y, causal = empty(q.array.shape, dtype), empty(q.array.shape, dtype)
    assert flash(q, k, v, mask, lens, y) == 0, library.last_error()
    expected = reference.prompt_attention(q.values, k.values, v.values, lens, HEADS, SCALE, added)
    assert_close(y, expected, off_by(dtype))
    assert flash(q, k, v, tile(dtype, CAUSAL), lens, causal) == 0
    assert not np.array_equal(y.bits, causal.bits)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_paged_attention_follows_its_mask(dtype: str) -> None:
    rng = np.random.default_rng(12)
    cache = Cache(dtype, block_size=32, num_kv_heads=KV_HEADS, head_dim=DIM)
    tables, query_lens, context_lens = [[3, 1], [5], [7, 2, 9]], [20, 1, 3], [40, 9, 70]
    for table, length in zip(tables, context_lens, strict=True):
        filled(rng, cache, table, length)
    q = rows(rng, sum(query_lens), HEADS * DIM, dtype)
    padded = np.array([table + [0] * (3 - len(table)) for table in tables])
    causal = causal_mask(query_lens, context_lens, 80)
    scattered = np.where(rng.random(causal.shape) < 0.5, MASKED, 0.0)
    scattered[:, 0] = 0.0
    for mask in (causal, np.zeros_like(causal), scattered, causal + rng.normal(size=causal.shape)):
        given = typed(mask, dtype)
        y = cache.attend(q, tables, query_lens, context_lens, mask=given)
        expected = reference.attention(
            q.values,
            cache.expected_key,
            cache.expected_value,
            padded,
            query_lens,
            context_lens,
            SCALE,
            mask=np.where(given.values < -5000, -np.inf, given.values),
        )
        assert_close(y, expected, off_by(dtype))
        with library.use_threads(1):
            alone = cache.attend(q, tables, query_lens, context_lens, mask=given)
        assert np.array_equal(alone.bits, y.bits)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_masks_of_other_requests_change_no_bit(dtype: str) -> None:
    rng = np.random.default_rng(15)
    cache = Cache(dtype, block_size=32, num_kv_heads=KV_HEADS, head_dim=DIM)
    tables, query_lens, context_lens = [[3, 1], [5, 7]], [20, 9], [40, 50]
    for table, length in zip(tables, context_lens, strict=True):
        filled(rng, cache, table, length)
    q = rows(rng, sum(query_lens), HEADS * DIM, dtype)
    mask = causal_mask(query_lens, context_lens, 64)
    mask[20:] += rng.normal(size=mask[20:].shape)
    both = cache.attend(q, tables, query_lens, context_lens, mask=typed(mask, dtype))
    for part, request in ((slice(0, 20), slice(0, 1)), (slice(20, 29), slice(1, 2))):
        given = tables[request], query_lens[request], context_lens[request]
        alone = cache.attend(q.rows(part), *given, mask=typed(mask[part], dtype))
        assert np.array_equal(alone.bits, both.rows(part).bits)


def test_attention_without_mask_is_causal_in_trapezoidal_mode_only() -> None:
    rng = np.random.default_rng(13)
    cache = Cache("bfloat16", num_kv_heads=KV_HEADS, head_dim=DIM)
    filled(rng, cache, [4, 2], 25)
    q = rows(rng, 6, HEADS * DIM, "bfloat16")
    step = q, [[4, 2]], [6], [25]
    causal = cache.attend(*step)
    expected = reference.attention(
        q.values, cache.expected_key, cache.expected_value, np.array([[4, 2]]), [6], [25], SCALE, mask=np.zeros((6, 25))
    )
    for none in (None, typed(np.zeros((1, 1)), "bfloat16")):
        seen = empty(q.array.shape, "bfloat16")
        assert cache.status(*step, seen, mask=none) == 0, library.last_error()
        assert_close(seen, expected, off_by("bfloat16"))
    y = empty(q.array.shape, "bfloat16")
    assert cache.status(*step, y, mask=None, mode=TRAPEZOIDAL) == 0
    assert np.array_equal(y.bits, causal.bits)


def test_masked_positions_may_contain_nan() -> None:
    rng = np.random.default_rng(14)
    cache = Cache("bfloat16", num_kv_heads=KV_HEADS, head_dim=DIM)
    filled(rng, cache, [4], 10)
    q = rows(rng, 2, HEADS * DIM, "bfloat16")
    kept = np.ones((2, 10), bool)
    kept[:, 3] = kept[0, 5] = False
    mask = typed(np.where(kept, 0, MASKED), "bfloat16")
    before = cache.attend(q, [[4]], [2], [10], mask=mask)
    dirty = typed(np.full((1, KV_HEADS * DIM), np.inf), "bfloat16")
    cache.store(typed(np.zeros((1, KV_HEADS * DIM)), "bfloat16"), dirty, [4 * 16 + 3])
    assert np.array_equal(cache.attend(q, [[4]], [2], [10], mask=mask).bits, before.bits)


@pytest.mark.parametrize(
    ("mask", "mode", "message"),
    [
        (np.zeros((6, 24)), 0, "attn_mask must have a row for each of 6 rows and a column for each of 25 keys"),
        (np.zeros((5, 25)), 0, "attn_mask must have a row for each of 6 rows and a column for each of 25 keys"),
        (np.zeros((6, 25)), TRAPEZOIDAL, "a mask and the mode TRAPEZOIDAL exclude each other"),
    ],
)
def test_mismatched_masks_are_refused(mask: Array, mode: int, message: str) -> None:
    cache = Cache("bfloat16", num_kv_heads=KV_HEADS, head_dim=DIM)
    q = typed(np.ones((6, HEADS * DIM)), "bfloat16")
    y = empty(q.array.shape, "bfloat16")
    assert cache.status(q, [[1, 2]], [6], [25], y, mask=typed(mask, "bfloat16"), mode=mode) != 0
    assert library.last_error() == f"PagedAttention: {message}"


@pytest.mark.parametrize(
    ("lens", "key_lens", "side", "layout", "message"),
    [
        ([5, 2], [5, 2], 128, TH, "lengths add up to 7, query has 8 rows"),
        ([5, 3], [4, 4], 128, TH, "query and key lengths must be the same"),
        ([9, -1], [9, -1], 128, TH, "a prompt has -1 rows"),
        ([5, 3], [5, 3], 128, 0, "input_layout must be TH, sparse_mode 0 and keep_prob 1"),
        ([5, 3], [5, 3], 0, TH, "attn_mask must be a square of floats"),
    ],
)
def test_mismatched_prompts_are_refused(
    lens: list[int], key_lens: list[int], side: int, layout: int, message: str
) -> None:
    q, k, v = prompts("bfloat16", 8)
    y = empty(q.array.shape, "bfloat16")
    assert flash(q, k, v, typed(np.zeros((side, side)), "bfloat16"), lens, y, key_lens, layout) != 0
    assert library.last_error() == f"FlashAttentionScore: {message}"
