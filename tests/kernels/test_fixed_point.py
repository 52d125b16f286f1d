from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.core.dtypes import round_to_bfloat16
from llm_serving.kernels import library
from llm_serving.network.weights import RowStack
from support.instruction_sets import real_isas
from support.kernel_calls import (
    FIXED_POINT_ISA,
    Array,
    Typed,
    assert_close,
    call,
    empty,
    fixed_point_bound,
    integers,
    linear,
    packed,
    scalar,
    status_of,
    typed,
)
from support.kernels import fixed_point, reference

MOST_ROWS = 40
ROWS = (1, 5, 12, 13, 24, MOST_ROWS)
COLUMNS = (1, 16, 33, 100)
INPUTS = (1, 2, 17, 95, 127, 128, 129, 255, 256, 300, 515, 1111)
LARGEST_BELOW_TWO = 1.9921875
"""The bfloat16 whose multiple is the largest, and whose norm is beside its exponent's power of two."""


pytestmark = pytest.mark.skipif(
    FIXED_POINT_ISA not in real_isas(), reason=f"needs a compiler and a CPU with {FIXED_POINT_ISA}"
)


@pytest.fixture(autouse=True, scope="module")
def instruction_set() -> Iterator[None]:
    with library.use_isa(FIXED_POINT_ISA):
        yield


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32)


def with_outliers(rng: np.random.Generator, values: Array) -> Array:
    """One number of each row a thousand times as large."""
    values[np.arange(len(values)), rng.integers(0, values.shape[1], len(values))] *= 1000
    return values


def heavy_tailed(rng: np.random.Generator, *shape: int) -> Array:
    return normal(rng, *shape) * np.exp(3 * normal(rng, *shape))


def halves(rng: np.random.Generator, *shape: int) -> Array:
    """One, and odd multiples of half its unit."""
    values = (2 * rng.integers(-64, 64, shape) + 1) * np.float32(2.0**-15)
    values[:, 0] = 1
    return values


def with_zeros(rng: np.random.Generator, *shape: int) -> Array:
    """Rows, blocks and a few others of zeros."""
    values = normal(rng, *shape) * (rng.random(shape) < 0.9)
    values[::3] = 0
    values[1::3, 128:256] = 0
    return values


def alternating(size: float, *shape: int) -> Array:
    return np.full(shape, size) * np.where(np.arange(shape[1]) % 2, -1, 1)


Pair = tuple[Array, Array]

KINDS: dict[str, Callable[[np.random.Generator, int, int, int], Pair]] = {
    "normal": lambda rng, m, n, k: (normal(rng, m, k), normal(rng, n, k)),
    "outliers among activations": lambda rng, m, n, k: (with_outliers(rng, normal(rng, m, k)), normal(rng, n, k)),
    "outliers among weights": lambda rng, m, n, k: (normal(rng, m, k), with_outliers(rng, normal(rng, n, k))),
    "one large column": lambda rng, m, n, k: (
        normal(rng, m, k),
        normal(rng, n, k) * np.where(np.arange(n) == n // 2, 1000, 1)[:, None],
    ),
    "heavy tails": lambda rng, m, n, k: (heavy_tailed(rng, m, k), heavy_tailed(rng, n, k)),
    "ones": lambda rng, m, n, k: (np.ones((m, k)), np.ones((n, k))),
    "just below two": lambda rng, m, n, k: (np.full((m, k), LARGEST_BELOW_TWO), np.full((n, k), LARGEST_BELOW_TWO)),
    "ones and just below two": lambda rng, m, n, k: (np.full((m, k), -1.0), np.full((n, k), LARGEST_BELOW_TWO)),
    "alternating": lambda rng, m, n, k: (alternating(LARGEST_BELOW_TWO, m, k), alternating(-LARGEST_BELOW_TWO, n, k)),
    "cancelling": lambda rng, m, n, k: (alternating(LARGEST_BELOW_TWO, m, k), np.full((n, k), LARGEST_BELOW_TWO)),
    "proportional": lambda rng, m, n, k: (lambda row: (np.tile(row, (m, 1)), np.tile(row, (n, 1))))(normal(rng, 1, k)),
    "constant of any size": lambda rng, m, n, k: (
        np.tile(1 + rng.random((m, 1)), (1, k)),
        np.full((n, k), LARGEST_BELOW_TWO),
    ),
    "halves of a unit": lambda rng, m, n, k: (halves(rng, m, k), halves(rng, n, k)),
    "tiny": lambda rng, m, n, k: (normal(rng, m, k) * 1e-30, normal(rng, n, k) * 1e-5),
    "below the least exponent": lambda rng, m, n, k: (normal(rng, m, k) * 1e-38, normal(rng, n, k) * 1e-33),
    "subnormal": lambda rng, m, n, k: (normal(rng, m, k) * 1e-38, normal(rng, n, k)),
    "subnormal weights": lambda rng, m, n, k: (normal(rng, m, k), normal(rng, n, k) * 1e-38),
    "subnormal results": lambda rng, m, n, k: (normal(rng, m, k) * 1e-20, normal(rng, n, k) * 1e-18),
    "large": lambda rng, m, n, k: (normal(rng, m, k) * 1e20, normal(rng, n, k) * 1e16),
    "overflowing": lambda rng, m, n, k: (normal(rng, m, k) * 1e20, normal(rng, n, k) * 1e19),
    "zeros": lambda rng, m, n, k: (with_zeros(rng, m, k), with_zeros(rng, n, k)),
}


def assert_equals_twin(x: Typed, weight: Typed) -> None:
    """Bit by bit, for every number of rows."""
    expected = fixed_point.linear(x.values, weight.values).view(np.uint32)
    panels = packed(weight)
    for m in sorted({rows for rows in ROWS if rows < len(expected)} | {len(expected)}):
        bits = linear(x.rows(slice(m)), panels, "float32").bits
        assert np.array_equal(bits, expected[:m]), (m, weight.array.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_point_bits_equal_numpy(kind: str) -> None:
    rng = np.random.default_rng(1)
    for k in INPUTS:
        for n in COLUMNS:
            x, weight = (typed(values, "bfloat16") for values in KINDS[kind](rng, MOST_ROWS, n, k))
            assert_equals_twin(x, weight)


@settings(max_examples=60)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 70),
    k=st.integers(1, 400),
    spreads=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    seed=st.integers(0, 2**32 - 1),
)
def test_fixed_point_bits_equal_numpy_for_any_spread(
    m: int, n: int, k: int, spreads: tuple[int, int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, weight = (
        typed(np.ldexp(normal(rng, rows, k), rng.integers(-spread, spread + 1, (rows, k))), "bfloat16")
        for rows, spread in zip((m, n), spreads, strict=True)
    )
    assert_equals_twin(x, weight)


def test_fixed_point_bfloat16_result_is_rounded_once() -> None:
    rng = np.random.default_rng(2)
    x, weight = typed(normal(rng, 17, 300), "bfloat16"), typed(normal(rng, 50, 300), "bfloat16")
    expected = round_to_bfloat16(fixed_point.linear(x.values, weight.values))
    assert np.array_equal(linear(x, packed(weight)).array, expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "overflowing"])
def test_fixed_point_product_equals_the_reference_up_to_half_a_unit(kind: str) -> None:
    rng = np.random.default_rng(3)
    for n, k in ((16, 17), (33, 128), (100, 515)):
        x, weight = (typed(values, "bfloat16") for values in KINDS[kind](rng, 13, n, k))
        # Subnormal inputs count as zero.
        inputs, weights = (
            np.where(np.abs(side.values) < 2.0**-126, 0, side.values).astype(np.float64) for side in (x, weight)
        )
        assert_close(
            linear(x, packed(weight), "float32"), reference.linear(inputs, weights), fixed_point_bound(x, weight)
        )


@pytest.mark.parametrize("kind", ["normal", "outliers among activations", "one large column"])
def test_fixed_point_errors_are_far_below_bfloat16_rounding(kind: str) -> None:
    """The unit of 128 activations x is at most 2 norm(x) norm(w) / 2^31, where w are the multiples of weights.

    Normal weights of which the largest is s to 2 s, with s of at least two standard deviations, have a norm of at most
    1.3 sqrt(128) / 2 * 2^14. Were each activation off by unit / sqrt(12), and none a multiple, then their sum would be
    off by 128 * 2 * 1.3 / 2 * 2^14 / 2^31 / sqrt(12) = 3.7e-4 of its standard deviation; weights add less than half as
    much. Rounding a sum to bfloat16 is off by 2^-7 / sqrt(12), of a number between one and two: 1.5e-3 of it.
    """
    rng = np.random.default_rng(4)
    x, weight = (typed(values, "bfloat16") for values in KINDS[kind](rng, 40, 100, 1024))
    exact = reference.linear(x.values, weight.values)
    error = linear(x, packed(weight), "float32").array - exact
    rounding = typed(exact, "bfloat16").values - exact
    scale = np.std(exact, axis=0)
    ratio = np.linalg.norm(error / scale) / np.linalg.norm(rounding / scale)
    assert ratio < 1 / 4


@pytest.mark.parametrize("k", [5, 128, 300])
@pytest.mark.parametrize("m", [1, 9, 40])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_fixed_point_row_with_infinity_or_nan_becomes_nan(value: float, m: int, k: int) -> None:
    rng = np.random.default_rng(5)
    x, weight = normal(rng, m, k), packed(typed(normal(rng, 50, k), "bfloat16"))
    row = m // 2
    clean = linear(typed(x, "bfloat16"), weight, "float32")
    x[row, k - 1] = value
    y = linear(typed(x, "bfloat16"), weight, "float32")
    assert np.all(np.isnan(y.array[row]))
    assert np.array_equal(np.delete(y.bits, row, axis=0), np.delete(clean.bits, row, axis=0))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_fixed_point_weight_with_infinity_or_nan_uses_float32(value: float) -> None:
    rng = np.random.default_rng(6)
    x, weight = typed(normal(rng, 9, 70), "bfloat16"), normal(rng, 50, 70)
    weight[[17, 49], [2, 69]] = value
    y = linear(x, packed(typed(weight, "bfloat16")), "float32")
    with library.use_isa("avx512"):
        in_float32 = linear(x, packed(typed(weight, "bfloat16")), "float32")
    assert np.array_equal(y.bits, in_float32.bits)


def test_fixed_point_supports_the_largest_numbers() -> None:
    rng = np.random.default_rng(6)
    x, weight = normal(rng, 7, 200), normal(rng, 20, 200) * np.float32(2.0**-30)
    x[3, 70], weight[5, 199] = 2.0**127 * LARGEST_BELOW_TWO, -(2.0**90) * LARGEST_BELOW_TWO
    assert_equals_twin(typed(x, "bfloat16"), typed(weight, "bfloat16"))


def test_fixed_point_weight_is_refused_by_other_isas() -> None:
    x, weight = typed(np.ones((2, 8)), "bfloat16"), packed(typed(np.ones((4, 8)), "bfloat16"))
    with library.use_isa("avx512"):
        y = empty((2, 4), "bfloat16")
        assert status_of("MatMul", x, weight, scalar(False, "bool"), scalar(True, "bool"), y) != 0
    assert library.last_error() == "MatMul: the weight was packed for another instruction set"


def test_fixed_point_embedding_reads_rows() -> None:
    rng = np.random.default_rng(8)
    weight = typed(heavy_tailed(rng, 50, 33), "bfloat16")
    rows, y = rng.integers(0, 50, 9), empty((9, 33), "bfloat16")
    call("Gather", packed(weight), integers(rows), scalar(0, "int64"), scalar(0, "int64"), y)
    units = 2.0 ** (np.floor(np.log2(np.abs(weight.values).max(axis=1, keepdims=True))) - 14)
    assert np.array_equal(y.values, (np.rint(weight.values / units) * units)[rows])


@settings(max_examples=40)
@given(m=st.integers(1, 40), n=st.integers(1, 90), k=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_fixed_point_multiples_of_the_unit_are_exact(m: int, n: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, weight = rng.integers(-32, 33, (m, k)), rng.integers(-128, 129, (n, k))
    y = linear(typed(x, "bfloat16"), packed(typed(weight, "bfloat16")), "float32")
    assert np.array_equal(y.array, x @ weight.T)


def test_fixed_point_repacked_weight_gets_new_units() -> None:
    rng = np.random.default_rng(7)
    x = typed(normal(rng, 3, 40), "bfloat16")
    place = np.empty((20, 40), np.uint16)
    for size in (1.0, 1e6, 1e-6):
        weight = typed(normal(rng, 20, 40) * size, "bfloat16")
        rows, _ = RowStack([weight.array]).addresses()
        library.load().llm_pack_weight(rows.ctypes.data, place.ctypes.data, b"bfloat16", 20, 40)
        bits = linear(x, Typed(place, "bfloat16"), "float32").bits
        assert np.array_equal(bits, fixed_point.linear(x.values, weight.values).view(np.uint32))
    library.load().llm_release_weight(place.ctypes.data)


def test_fixed_point_accepts_empty_input() -> None:
    weight = packed(typed(np.ones((20, 8)), "bfloat16"))
    assert linear(typed(np.ones((0, 8)), "bfloat16"), weight).array.shape == (0, 20)
    no_inputs = linear(typed(np.ones((3, 0)), "bfloat16"), packed(typed(np.ones((20, 0)), "bfloat16")), "float32")
    assert np.array_equal(no_inputs.array, np.zeros((3, 20)))
