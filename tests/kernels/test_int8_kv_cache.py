"""The int8 KV cache: stored values equal NumPy's, attention equals that of the dequantized cache, bits are
invariant."""

import functools
import itertools
from typing import Any

import numpy as np
import pytest
from llm_serving.kernels import library
from llm_serving.network.builder import Network
from llm_serving.network.caches import INT8_SCALE_BYTES, CacheShape
from llm_serving.network.operations import Weight
from support.decoder_calls import Step
from support.kernel_calls import FLOAT32_UNIT, FLOAT_TYPES, ROUNDING_UNIT, Array, Typed, assert_close, typed
from support.kernels import int8_kv_cache, reference
from support.kernels_cache import SCALE
from support.program_calls import BLOCK_SIZE, Blocks, Runnable, parameters, run, runnable_of, status_of_program

GROUP = 16
CHUNK = 64
KV_HEADS = 2
SHAPES = [(4, 16), (4, 64), (6, 80), (16, 128), (2, 256)]
"""Heads of queries and elements of a head."""
KINDS: dict[str, dict[str, Any]] = {
    "all": {},
    "window": {"window": 37},
    "cap": {"largest": 3.0},
    "slopes": {"slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32)},
}


def attention_of(
    x: Typed,
    num_heads: int,
    head_dim: int,
    largest: float = 0.0,
    window: int = 0,
    slopes: Array | None = None,
) -> Runnable:
    """Rows of x are queries, keys and values."""
    net = Network(x.array.shape[1], len(x.array), 1e-5)
    widths = [heads * head_dim for heads in (num_heads, KV_HEADS, KV_HEADS)]
    q, k, v = net.split(net.embedding("x"), *widths)
    count = (num_heads,)
    weight = None if slopes is None else Weight(("slopes",), count, (count,), dtype="float32")
    stored = net.store_kv(k, v, KV_HEADS)
    net.lm_head(net.attention(q, stored, scale=SCALE, window=window, cap=largest, slopes=weight), "one")
    given = {"x.weight": x.values, "one.weight": np.eye(widths[0]), "slopes": slopes}
    with library.use_isa("plain"):  # which keeps weights as they are
        return runnable_of(net, {each: given[each.names[0]] for each in net.weights}, x.dtype)


def coded_blocks(shape: CacheShape, num_blocks: int = 24) -> Blocks:
    sizes = (num_blocks, BLOCK_SIZE, shape.kv_heads)
    widths = shape.key_width, shape.value_width
    return Blocks(*(Typed(np.zeros((*sizes, width + INT8_SCALE_BYTES), np.int8), "int8") for width in widths))


def caches_of(runnable: Runnable, num_blocks: int = 24) -> list[Blocks]:
    return [coded_blocks(shape, num_blocks) for shape in runnable.caches]


def random(count: int, num_heads: int, head_dim: int, dtype: str, seed: int = 1) -> Typed:
    width = (num_heads + 2 * KV_HEADS) * head_dim
    return typed(np.random.default_rng(seed).standard_normal((count, width)), dtype)


def step_of(table: list[int], first: int, last: int, **changes: Any) -> Step:
    """Tokens of one request, each a row of the table; the cache has those before `first`."""
    tokens = list(range(first, last))
    slots = [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in tokens]
    step = Step(tokens, [0] * len(tokens), slots, [table], [last - first], [last], list(range(last - first)))
    return Step(**{**vars(step), **changes})


def parts(x: Typed, num_heads: int, head_dim: int) -> list[Array]:
    """Queries, keys and values."""
    return np.split(x.values.astype(np.float64), [num_heads * head_dim, (num_heads + KV_HEADS) * head_dim], axis=1)


TABLE = [3, 1, 4, 15, 9, 2, 6, 5, 8, 7]
COUNT = 150


def content(cache: Typed, *, keys: bool) -> tuple[Array, Array]:
    """Qvalues [slots, heads, D] and scales [slots, heads] of a cache, in the order of csrc/kv_layout.h."""
    blocks, block_size, heads, width = cache.array.shape
    dim, groups = width - INT8_SCALE_BYTES, block_size // GROUP
    memory = cache.array.reshape(blocks, heads, groups, GROUP * width)
    qvalues = memory[..., : GROUP * dim]
    scales = np.ascontiguousarray(memory[..., GROUP * dim :]).view(np.float32)
    inputs = 4
    if keys:
        qvalues = qvalues.reshape(-1, dim // inputs, GROUP, inputs).transpose(0, 2, 1, 3)
    else:
        qvalues = qvalues.reshape(-1, dim // GROUP, GROUP // inputs, GROUP, inputs).transpose(0, 2, 4, 1, 3)
    qvalues = qvalues.reshape(blocks, heads, block_size, dim).transpose(0, 2, 1, 3).reshape(-1, heads, dim)
    return qvalues, scales.reshape(blocks, heads, block_size).transpose(0, 2, 1).reshape(-1, heads)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("head_dim", [16, 48, 128])
def test_int8_kv_cache_stores_what_numpy_quantizes(isa_of_codes: str, dtype: str, head_dim: int) -> None:
    values = random(40, 4, head_dim, dtype).values.astype(np.float64)
    values *= 10.0 ** np.random.default_rng(2).integers(-4, 4, (40, 1))
    values[7, 4 * head_dim :] = 0
    values[9, 5 * head_dim] = np.inf
    values[11, -1] = np.nan
    x = typed(values, dtype)
    runnable = attention_of(x, 4, head_dim)
    (cache,) = caches_of(runnable)
    step = step_of(TABLE[:3], 0, 40)
    slots = np.array(step.slots)
    step.slots[5] = -1
    run(runnable, step, [cache])
    _, k, v = parts(x, 4, head_dim)
    kept = np.arange(40) != 5
    for rows, memory, keys in ((k, cache.key, True), (v, cache.value, False)):
        qvalues, scales = content(memory, keys=keys)
        quantize = int8_kv_cache.quantize_rotated_heads if keys else int8_kv_cache.quantize_heads
        expected, expected_scales = quantize(rows.astype(np.float32), KV_HEADS)
        assert np.array_equal(qvalues[slots[kept]], expected[kept])
        assert np.array_equal(scales[slots[kept]], expected_scales[kept], equal_nan=True)
        others = np.setdiff1d(np.arange(len(qvalues)), slots[kept])
        assert not qvalues[others].any() and not scales[others].any()


@pytest.mark.parametrize(
    ("dtype", "num_heads", "head_dim", "kind"),
    [
        *((dtype, *shape, "all") for dtype, shape in zip(itertools.cycle(FLOAT_TYPES), SHAPES, strict=False)),
        *((dtype, 4, 64, kind) for dtype, kind in zip(FLOAT_TYPES, ("window", "cap", "slopes"), strict=True)),
    ],
)
def test_int8_kv_cache_attention_equals_the_dequantized_reference(
    isa_of_codes: str, dtype: str, num_heads: int, head_dim: int, kind: str
) -> None:
    x = random(COUNT, num_heads, head_dim, dtype)
    runnable = attention_of(x, num_heads, head_dim, **KINDS[kind])
    y = run(runnable, step_of(TABLE, 0, COUNT), caches_of(runnable))
    assert_close(typed(y.array, dtype), *expected_attention(dtype, num_heads, head_dim, kind))


@functools.cache  # for all instruction sets
def expected_attention(dtype: str, num_heads: int, head_dim: int, kind: str) -> tuple[Array, Array]:
    """Attention to the dequantized values, and the largest error of a result."""
    options = KINDS[kind]
    q, k, v = parts(random(COUNT, num_heads, head_dim, dtype), num_heads, head_dim)
    q = int8_kv_cache.restored_rotated(q.astype(np.float32), num_heads)
    k = int8_kv_cache.restored_rotated(k.astype(np.float32), KV_HEADS)
    v = int8_kv_cache.restored(v.astype(np.float32), KV_HEADS)
    dense = [each.reshape(COUNT, 1, KV_HEADS, head_dim) for each in (k, v)]
    given = np.arange(COUNT)[None], [COUNT], [COUNT], SCALE
    expected = reference.attention(q, *dense, *given, **options)
    magnitude = reference.attention(q, dense[0], np.abs(dense[1]), *given, **options)
    # As in test_program_operations.py, but that sums of codes are exact: scales are one more rounding each.
    score = 2 * head_dim * FLOAT32_UNIT * np.abs(q).max() * np.abs(k).max() * head_dim * SCALE
    score += 8 * FLOAT32_UNIT * (options.get("largest", 0.0) + COUNT)
    delta = np.expm1(score) + 10 * FLOAT32_UNIT + ROUNDING_UNIT[dtype] + 4 * COUNT * FLOAT32_UNIT
    bound = 2.2 * delta * magnitude + ROUNDING_UNIT[dtype] * np.abs(expected)
    # Weights are in units: the largest of a chunk is 255. The dither makes an error of at most one unit, with a mean
    # square of at most 1/4. The bound is six standard deviations of the sum of 64 independent errors.
    bound += 6 * np.sqrt(CHUNK / 4) / int8_kv_cache.MAX_WEIGHT * np.abs(v).max()
    return expected, bound


@pytest.mark.parametrize("head_dim", [16, 80, 256])
def test_int8_kv_cache_sums_values_as_numpy(isa_of_codes: str, head_dim: int) -> None:
    """A query of zeros gives every key the score 0, exactly."""
    rows = random(CHUNK, 4, head_dim, "float32").values
    rows = rows * np.float32(10) ** np.random.default_rng(2).integers(-3, 2, (CHUNK, 1)).astype(np.float32)
    rows[:, : 4 * head_dim] = 0
    rows[0, -head_dim:] = 0
    x = typed(rows, "float32")
    runnable = attention_of(x, 4, head_dim)
    y = run(runnable, step_of(TABLE, 0, CHUNK), caches_of(runnable)).array.reshape(CHUNK, 4, head_dim)
    values = x.values[:, -KV_HEADS * head_dim :].reshape(CHUNK, KV_HEADS, head_dim)
    num_equal = 0
    for row in range(CHUNK):
        for head in range(4):
            seen = values[: row + 1, head // 2]
            expected = int8_kv_cache.weighted_sum(np.zeros(row + 1, np.float32), seen)
            # The rounding of an instruction set without fused multiply-add may change a weight by one unit.
            unit = np.abs(seen).max() / int8_kv_cache.MAX_WEIGHT
            np.testing.assert_allclose(y[row, head], expected, rtol=1e-5, atol=unit)
            num_equal += np.allclose(y[row, head], expected, rtol=1e-5, atol=1e-5 * unit)
    assert num_equal > 0.97 * 4 * CHUNK


def test_int8_kv_cache_keeps_the_sum_of_many_small_weights(isa_of_codes: str) -> None:
    """The first of 64 tokens has 1,000 times the weight of each other token. Without the dither, the 63 small weights
    would round to zero.
    """
    head_dim = 64
    rows = np.zeros((CHUNK, (4 + 2 * KV_HEADS) * head_dim), np.float32)
    q, k, v = parts(typed(rows, "float32"), 4, head_dim)
    q[:, ::head_dim] = np.log(1000) / SCALE
    k[0, ::head_dim] = 1
    v[1:] = 1
    x = typed(np.concatenate([q, k, v], axis=1), "float32")
    runnable = attention_of(x, 4, head_dim)
    y = run(runnable, step_of(TABLE, 0, CHUNK), caches_of(runnable)).array
    np.testing.assert_allclose(y[-1], 63 / 1063, rtol=0.03)


def test_int8_kv_cache_is_as_accurate_beside_a_large_value_of_almost_no_weight(isa_of_codes: str) -> None:
    head_dim, num_heads = 64, 4
    q, k, v = parts(random(CHUNK, num_heads, head_dim, "float32"), num_heads, head_dim)
    q[:, ::head_dim], k[:, ::head_dim], k[5, ::head_dim] = 8 / head_dim**0.5 / SCALE, 1, -30
    v[5] *= 100
    x = typed(np.concatenate([q, k, v], axis=1), "float32")
    runnable = attention_of(x, num_heads, head_dim)
    y = run(runnable, step_of(TABLE, 0, CHUNK), caches_of(runnable)).array[-1]
    dense = [each.reshape(CHUNK, 1, KV_HEADS, head_dim) for each in (k, v)]
    exact = reference.attention(q, *dense, np.arange(CHUNK)[None], [CHUNK], [CHUNK], SCALE)[-1]
    assert np.linalg.norm(y - exact) < 0.1 * np.linalg.norm(exact)


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e4, 1e20])
def test_int8_kv_cache_counts_the_weights_of_values_of_any_size(isa_of_codes: str, factor: float) -> None:
    """One of 64 tokens with equal weights has a value `factor` times as large."""
    head_dim, num_heads, largest = 64, 4, max(1.0, factor)
    q, k, v = parts(random(CHUNK, num_heads, head_dim, "float32"), num_heads, head_dim)
    q[...] = 0
    v[5] *= factor
    x = typed(np.concatenate([q, k, v], axis=1), "float32")
    runnable = attention_of(x, num_heads, head_dim)
    y = run(runnable, step_of(TABLE, 0, CHUNK), caches_of(runnable)).array
    dense = [each.reshape(CHUNK, 1, KV_HEADS, head_dim) for each in (k, v)]
    exact = reference.attention(q, *dense, np.arange(CHUNK)[None], [CHUNK], [CHUNK], SCALE)
    np.testing.assert_allclose(y / largest, exact / largest, atol=0.03)


@pytest.mark.parametrize("rows", ["query", "key", "value"])
def test_int8_kv_cache_gives_nan_for_nan_in_what_a_row_sees(isa_of_codes: str, rows: str) -> None:
    head_dim, num_heads = 32, 4
    x = random(70, num_heads, head_dim, "float32").values.astype(np.float64)
    column = {"query": 0, "key": num_heads, "value": num_heads + KV_HEADS}[rows] * head_dim
    x[20, column] = np.nan
    runnable = attention_of(typed(x, "float32"), num_heads, head_dim)
    y = run(runnable, step_of(TABLE, 0, 70), caches_of(runnable)).array
    position = np.arange(70)
    is_nan = position == 20 if rows == "query" else position >= 20
    assert np.array_equal(np.isnan(y).any(axis=1), is_nan)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_int8_kv_cache_bits_do_not_depend_on_chunking(isa_of_codes: str, dtype: str) -> None:
    x = random(COUNT, 4, 32, dtype)
    runnable = attention_of(x, 4, 32, window=90)

    def computed(table: list[int], cuts: list[int], threads: int, noise: float) -> Array:
        (cache,) = caches_of(runnable)
        for each in (cache.key, cache.value):  # what somebody else has left there, scales of `noise` among it
            each.array[...] = np.resize(np.full(1, noise, np.float32).view(np.int8), each.array.shape)
        ends = zip([0, *cuts], [*cuts, COUNT], strict=True)
        with library.use_threads(threads):
            return np.concatenate([run(runnable, step_of(table, *each), [cache]).bits for each in ends])

    whole = computed(TABLE, [], 1, 0.0)
    for threads in (1, 2):
        for cuts in ([1], [64], [7, 16, 80, 81, 128, 149], list(range(1, COUNT))):
            assert np.array_equal(computed([19, 2, 7, 21, 0, 13, 5, 11, 16, 4], cuts, threads, np.nan), whole), cuts


@pytest.mark.parametrize("context", [1100])
def test_int8_kv_cache_bits_do_not_depend_on_threads(isa_of_codes: str, context: int) -> None:
    x = random(context, 4, 16, "bfloat16")
    runnable = attention_of(x, 4, 16)
    table = list(range(-(-context // BLOCK_SIZE)))
    caches = caches_of(runnable, num_blocks=len(table))
    run(runnable, step_of(table, 0, context - 1), caches)
    results = []
    for threads in (1, 3):
        with library.use_threads(threads):
            results.append(run(runnable, step_of(table, context - 1, context), caches).bits)
    assert np.array_equal(*results)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_int8_kv_cache_later_infinity_does_not_reach_earlier_rows(isa_of_codes: str, dtype: str) -> None:
    clean = random(30, 4, 32, dtype)
    dirty = clean.values.astype(np.float64)
    dirty[20, -1] = np.inf
    results = []
    for x in (clean, typed(dirty, dtype)):
        runnable = attention_of(x, 4, 32)
        results.append(run(runnable, step_of(TABLE[:2], 0, 30), caches_of(runnable)))
    expected, y = results
    assert np.array_equal(y.bits[:20], expected.bits[:20])
    assert np.isnan(y.array[20:]).any(axis=1).all()


def test_int8_kv_cache_refuses_other_shapes() -> None:
    x = random(4, 4, 32, "bfloat16")
    runnable = attention_of(x, 4, 32)
    (cache,) = caches_of(runnable)
    narrow = Blocks(*(Typed(np.ascontiguousarray(each.array[..., :-1]), "int8") for each in (cache.key, cache.value)))
    for given in (narrow, Blocks(cache.key, typed(np.zeros((24, 16, 2, 32)), "bfloat16"))):
        assert status_of_program(parameters(runnable, step_of(TABLE, 0, 4), [given])) != 0
        assert "or int8 [.., head_dim + 4] of codes and scales" in library.last_error()
