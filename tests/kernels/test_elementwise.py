import numpy as np
import pytest
from llm_serving.kernels import library
from support.kernel_calls import (
    FLOAT32_UNIT,
    FLOAT_TYPES,
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

WIDTHS = (1, 15, 16, 17, 64, 100, 288, 2048)
EPS = 1e-5


def rms_norm(x: Typed, gamma: Typed) -> Typed:
    y = empty(x.array.shape, x.dtype)
    call("RmsNorm", x, gamma, scalar(EPS, "float32"), y, empty((len(x.array), 1), "float32"))
    return y


def swiglu(x: Typed) -> Typed:
    y = empty((len(x.array), x.array.shape[1] // 2), x.dtype)
    call("Swiglu", x, scalar(-1, "int64"), y)
    return y


def rotated(x: Typed, cos: Typed, sin: Typed) -> Typed:
    y, also_y = empty(x.array.shape, x.dtype), empty(x.array.shape, x.dtype)
    call("ApplyRotaryPosEmb", x, x, cos, sin, integers([1]), scalar(2, "int64"), y, also_y)
    assert np.array_equal(y.bits, also_y.bits)
    return y


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_rms_norm_equals_the_reference_up_to_rounding(isa: str, dtype: str) -> None:
    for width in WIDTHS:
        x, gamma = typed(normal(width, 5, width), dtype), typed(normal(1, width), dtype)
        expected = reference.rms_norm(x.values, gamma.values, EPS)
        # Sixteen running sums of squares, a tree of them, a root, and three factors.
        bound = (width / 16 + 16) * FLOAT32_UNIT * np.abs(expected)
        assert_close(rms_norm(x, gamma), expected, bound)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_add_rms_norm_rounds_the_sum_before_the_norm(isa: str, dtype: str) -> None:
    for width in WIDTHS:
        a, b, gamma = (
            typed(normal(seed, *shape), dtype) for seed, shape in ((1, (5, width)), (2, (5, width)), (3, (width,)))
        )
        total, normed, also_total = (empty((5, width), dtype) for _ in range(3))
        call("AddExt", a, b, scalar(1, "int64"), total)
        call("AddRmsNorm", a, b, gamma, scalar(EPS, "float32"), normed, empty((5, 1), "float32"), also_total)
        assert np.array_equal(also_total.bits, total.bits)
        assert np.array_equal(normed.bits, rms_norm(total, gamma).bits)


def test_add_rms_norm_refuses_different_shapes(isa: str) -> None:
    a, b, gamma, y = (typed(np.ones(shape), "float32") for shape in ((2, 8), (1, 8), (8,), (2, 8)))
    rstd = empty((2, 1), "float32")
    assert status_of("AddRmsNorm", a, b, gamma, scalar(EPS, "float32"), y, rstd, y) != 0
    assert library.last_error() == "AddRmsNorm: both inputs must be of one type and shape"


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_rms_norm_of_zeros_and_of_infinity(isa: str, dtype: str) -> None:
    x = np.zeros((3, 40))
    x[1, 7] = np.inf
    y = rms_norm(typed(x, dtype), typed(np.ones(40), dtype)).values
    assert np.all(y[[0, 2]] == 0)
    assert np.isnan(y[1, 7])


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_swiglu_equals_the_reference_up_to_rounding(isa: str, dtype: str) -> None:
    for width in WIDTHS:
        x = typed(3 * normal(width, 4, 2 * width), dtype)
        expected = reference.swiglu(x.values)
        # The exponential is off by at most 8 units, quotient and product by one each.
        assert_close(swiglu(x), expected, 12 * FLOAT32_UNIT * np.abs(expected))


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_swiglu_of_extreme_gates(isa: str, dtype: str) -> None:
    gates = np.array(
        [-1e4, -200.0, -90.0, -87.5, -20.0, -1e-4, -0.0, 0.0, 1e-7, 20.0, 88.0, 200.0, 1e4, np.inf, np.nan]
    )
    x = typed(np.concatenate([gates, np.ones_like(gates)])[None], dtype)
    expected = reference.swiglu(x.values)
    y = swiglu(x)
    finite = np.isfinite(expected)
    assert_close(Typed(y.array[finite], dtype), expected[finite], 12 * FLOAT32_UNIT * np.abs(expected[finite]) + 1e-36)
    assert y.values[0, -2] == np.inf and np.isnan(y.values[0, -1])


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("table_is_float32", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 16), (2, 48), (5, 64), (1, 130)])
def test_rotary_equals_the_reference_up_to_rounding(
    isa: str, dtype: str, table_is_float32: bool, heads: int, head_dim: int
) -> None:
    x = typed(normal(1, 7, heads * head_dim), dtype)
    angles = np.tile(normal(2, 7, head_dim // 2), 2)
    tables = [typed(f(angles), "float32" if table_is_float32 else dtype) for f in (np.cos, np.sin)]
    expected = reference.rotary(x.values, *(table.values for table in tables))
    magnitude = reference.rotary(np.abs(x.values), *(np.abs(table.values) for table in tables))
    assert_close(rotated(x, *tables), expected, 3 * FLOAT32_UNIT * (np.abs(magnitude) + np.abs(x.values).max()))


def test_rotary_accepts_rows_inside_another_axis() -> None:
    x = typed(normal(1, 7, 3 * 16), "bfloat16")
    angles = np.tile(normal(2, 7, 8), 2)
    tables = typed(np.cos(angles), "bfloat16"), typed(np.sin(angles), "bfloat16")
    assert np.array_equal(rotated(Typed(x.array[None], x.dtype), *tables).bits[0], rotated(x, *tables).bits)


def test_rotary_positions_follow_from_lengths() -> None:
    q, k = typed(normal(1, 5, 64), "bfloat16"), typed(normal(2, 5, 32), "bfloat16")
    angles = np.tile(normal(3, 9, 8), 2)
    cos, sin = typed(np.cos(angles), "bfloat16"), typed(np.sin(angles), "bfloat16")
    positions = np.array([0, 1, 2, 0, 1])
    tables = (cos.rows(positions), sin.rows(positions))
    expected = [rotated(x, *tables).bits for x in (q, k)]
    results = empty((5, 64), "bfloat16"), empty((5, 32), "bfloat16")
    call("ApplyRotaryPosEmb", q, k, cos, sin, integers([3, 2]), scalar(2, "int64"), *results)
    assert all(np.array_equal(result.bits, bits) for result, bits in zip(results, expected, strict=True))
    status = status_of("ApplyRotaryPosEmb", q, k, cos, sin, integers([3, 3]), scalar(2, "int64"), *results)
    assert status != 0
    assert library.last_error() == "ApplyRotaryPosEmb: 5 rows fit neither the tables nor the lengths"


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (64, 1024)])
def test_add_is_exact_up_to_one_rounding(isa: str, dtype: str, shape: tuple[int, int]) -> None:
    a, b = typed(normal(1, *shape), dtype), typed(normal(2, *shape), dtype)
    y = empty(shape, dtype)
    call("AddExt", a, b, scalar(1, "int64"), y)
    expected = typed(a.values.astype(np.float32) + b.values.astype(np.float32), dtype)
    assert np.array_equal(y.bits, expected.bits)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_elementwise_operators_are_batch_invariant(isa: str, dtype: str) -> None:
    x, gamma = typed(normal(1, 300, 200), dtype), typed(normal(2, 200), dtype)
    whole = [rms_norm(x, gamma).bits, swiglu(x).bits]
    for threads in (1, 2):
        with library.use_threads(threads):
            for count in (1, 2, 17, 299):
                part = x.rows(slice(300 - count, 300))
                for bits, result in zip(whole, (rms_norm(part, gamma), swiglu(part)), strict=True):
                    assert np.array_equal(result.bits, bits[300 - count :])
