import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.kernels import library
from support.kernel_calls import (
    FIXED_POINT_ISA,
    FLOAT_TYPES,
    Typed,
    assert_close,
    call,
    empty,
    fixed_point_bound,
    float32_sum_bound,
    integers,
    linear,
    packed,
    scalar,
    status_of,
    typed,
)
from support.kernels import reference

SHAPES = [(1, 16, 32), (1, 1, 1), (2, 64, 300), (3, 50, 64), (5, 33, 17), (7, 200, 95), (17, 100, 272), (40, 130, 515)]
BATCHES = (1, 2, 5, 16, 17, 64, 128, 300)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def sum_bound(isa: str, x: Typed, weight: Typed) -> np.ndarray:
    """Largest difference of an instruction set's sums from the exact ones."""
    if isa == FIXED_POINT_ISA and x.dtype == "bfloat16":
        return fixed_point_bound(x, weight)
    return float32_sum_bound(x, weight)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("result", [None, "float32"])
def test_linear_equals_the_reference_up_to_rounding(isa: str, dtype: str, result: str | None) -> None:
    rng = np.random.default_rng(1)
    for m, n, k in SHAPES:
        x, weight = typed(normal(rng, m, k), dtype), typed(normal(rng, n, k), dtype)
        y = linear(x, packed(weight), result)
        assert_close(y, reference.linear(x.values, weight.values), sum_bound(isa, x, weight))


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize(("n", "k"), [(200, 512), (72, 1111)])
def test_linear_is_batch_invariant(isa: str, dtype: str, n: int, k: int) -> None:
    rng = np.random.default_rng(2)
    x, weight = (typed(normal(rng, 300, k), dtype), packed(typed(normal(rng, n, k), dtype)))
    with library.use_threads(1):
        alone = np.concatenate([linear(x.rows([i]), weight, "float32").bits for i in range(0, 300, 7)])
    for threads in (1, 2):
        with library.use_threads(threads):
            for m in BATCHES:
                y = linear(x.rows(slice(m)), weight, "float32").bits
                assert np.array_equal(y[::7], alone[: len(y[::7])]), (threads, m)
    shuffled = rng.permutation(300)
    assert np.array_equal(linear(x.rows(shuffled), weight, "float32").bits[np.argsort(shuffled)][::7], alone)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("offset", [0, 1, 16])
@pytest.mark.parametrize("n", [64, 200, 544])
def test_linear_rounds_each_sum_once(isa: str, dtype: str, offset: int, n: int) -> None:
    rng = np.random.default_rng(4)
    x, weight = typed(normal(rng, 150, 96), dtype), packed(typed(normal(rng, n, 96), dtype))
    memory = empty((150 * n + 64,), dtype)
    before = memory.bits.copy()
    first = -memory.array.ctypes.data % 64 // memory.array.itemsize + offset
    y = Typed(memory.array[first : first + 150 * n].reshape(150, n), dtype)
    call("MatMul", x, weight, scalar(False, "bool"), scalar(True, "bool"), y)
    assert np.array_equal(y.bits, typed(linear(x, weight, "float32").array, dtype).bits)
    beside = np.r_[:first, first + 150 * n : memory.array.size]
    assert np.array_equal(memory.bits[beside], before[beside])


@settings(max_examples=40)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 90),
    k=st.integers(1, 300),
    dtype=st.sampled_from(FLOAT_TYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_linear_of_small_integers_is_exact(m: int, n: int, k: int, dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, weight = rng.integers(-8, 9, (m, k)), rng.integers(-8, 9, (n, k))
    y = linear(typed(x, dtype), packed(typed(weight, dtype)), "float32")
    assert np.array_equal(y.array, x @ weight.T)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_linear_of_small_integers_is_exact_on_every_isa(isa: str, dtype: str) -> None:
    rng = np.random.default_rng(3)
    for m, n, k in [*SHAPES, (4, 48, 256), (33, 17, 31)]:
        x, weight = rng.integers(-8, 9, (m, k)), rng.integers(-8, 9, (n, k))
        y = linear(typed(x, dtype), packed(typed(weight, dtype)), "float32")
        assert np.array_equal(y.array, x @ weight.T), (m, n, k)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_linear_keeps_infinity_and_nan_in_their_row_and_column(isa: str, dtype: str) -> None:
    if (isa, dtype) == (FIXED_POINT_ISA, "bfloat16"):
        pytest.skip("they have no units: see test_fixed_point.py")
    rng = np.random.default_rng(4)
    clean_x, clean_weight = normal(rng, 9, 70), normal(rng, 40, 70)
    x, weight = clean_x.copy(), clean_weight.copy()
    x[3, 5], x[6, 69], weight[17, 2] = np.inf, np.nan, -np.inf
    y = linear(typed(x, dtype), packed(typed(weight, dtype))).values
    expected = linear(typed(clean_x, dtype), packed(typed(clean_weight, dtype))).values
    rows, columns = np.delete(np.arange(9), [3, 6]), np.delete(np.arange(40), 17)
    assert np.array_equal(y[np.ix_(rows, columns)], expected[np.ix_(rows, columns)])
    assert np.array_equal(y[3, columns], np.copysign(np.inf, typed(weight, dtype).values[columns, 5]))
    assert np.all(np.isnan(y[6]))
    assert np.array_equal(y[rows, 17], np.copysign(np.inf, -typed(x, dtype).values[rows, 2]))


@pytest.mark.parametrize(
    ("dtype", "magnitude"),
    [
        (dtype, size)
        for dtype in FLOAT_TYPES
        for size in (1e-42, 1e-38, 1e-20, 1e4, 1e30)
        if (dtype, size) != ("float16", 1e30)
    ],
)
def test_linear_with_extreme_magnitudes(isa: str, dtype: str, magnitude: float) -> None:
    rng = np.random.default_rng(5)
    x, weight = (typed(normal(rng, 4, 64) * np.float32(magnitude), dtype), typed(normal(rng, 20, 64), dtype))
    expected = reference.linear(x.values, weight.values)
    # Subnormal inputs may count as zero: what they would have contributed.
    lost = np.where(np.abs(x.values) < 2.0**-126, np.abs(x.values), 0).astype(np.float64)
    bound = sum_bound(isa, x, weight) + lost @ np.abs(weight.values.astype(np.float64)).T
    assert_close(linear(x, packed(weight), "float32"), expected, bound)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_linear_with_unpacked_weights(dtype: str, transpose_a: bool, transpose_b: bool) -> None:
    rng = np.random.default_rng(6)
    x, weight = rng.integers(-8, 9, (5, 37)), rng.integers(-8, 9, (21, 37))
    y = empty((5, 21), "float32")
    call(
        "MatMul",
        typed(x.T.copy() if transpose_a else x, dtype),
        typed(weight if transpose_b else weight.T.copy(), dtype),
        scalar(transpose_a, "bool"),
        scalar(transpose_b, "bool"),
        y,
    )
    assert np.array_equal(y.array, x @ weight.T)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (50, 33), (64, 48), (17, 2)])
def test_embedding_reads_rows_of_a_packed_weight(dtype: str, n: int, k: int) -> None:
    rng = np.random.default_rng(7)
    weight = typed(normal(rng, n, k), dtype)
    rows = rng.integers(0, n, 9)
    y = empty((9, k), dtype)
    with library.use_isa("plain"):  # which keeps weights as they are
        table = packed(weight)
    call("Gather", table, integers(rows), scalar(0, "int64"), scalar(0, "int64"), y)
    assert np.array_equal(y.bits, weight.bits[rows])


def test_linear_accepts_empty_input() -> None:
    weight = typed(np.ones((20, 8)), "float32")
    assert linear(typed(np.ones((0, 8)), "float32"), packed(weight)).array.shape == (0, 20)
    empty_sum = linear(typed(np.ones((3, 0)), "float32"), typed(np.ones((20, 0)), "float32"))
    assert np.array_equal(empty_sum.array, np.zeros((3, 20)))


def test_linear_refuses_mismatched_shapes_and_types() -> None:
    def multiply(x: Typed, weight: Typed, y: Typed) -> int:
        return status_of("MatMul", x, weight, scalar(False, "bool"), scalar(True, "bool"), y)

    x, weight = typed(np.ones((2, 8)), "float32"), typed(np.ones((4, 9)), "float32")
    y = empty((2, 4), "float32")
    assert multiply(x, weight, y) != 0
    assert library.last_error() == "MatMul: shapes [2, 8] x [4, 9] do not fit"
    assert multiply(x, typed(np.ones((4, 8)), "bfloat16"), y) != 0
    assert multiply(x, typed(np.ones((4, 8)), "float32"), empty((2, 5), "float32")) != 0
    assert multiply(integers(np.ones((2, 8))), integers(np.ones((4, 8))), integers(np.ones((2, 4)))) != 0
