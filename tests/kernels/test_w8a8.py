"""W8A8 products: bit-identical to NumPy on every instruction set."""

import functools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.kernels import library
from llm_serving_tools.quantized_parts import quantize_w8
from support.instruction_sets import EMULATED, isas_of_qvalues, real_isas
from support.kernel_calls import (
    Array,
    Typed,
    assert_close,
    call,
    empty,
    integers,
    linear,
    quantized,
    scalar,
    status_of,
    typed,
)
from support.kernels import quantized_products, reference

pytestmark = pytest.mark.skipif(not real_isas(), reason="needs a compiler")

SHAPES = [(1, 16, 32), (1, 1, 1), (2, 64, 300), (3, 50, 65), (5, 33, 18), (7, 200, 95), (19, 100, 2311), (40, 130, 515)]
BATCHES = (1, 2, 6, 7, 18, 19, 64, 128, 300)
MOST_INPUTS = 65536
MOST_EMULATED = 50_000
"""Weights of one shape that large batches use on instruction sets with vector loops."""


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32)


def random_weight(rng: np.random.Generator, n: int, k: int) -> tuple[Array, Array]:
    return rng.integers(-128, 128, (n, k)).astype(np.int8), signed_scales(rng, n)


def signed_scales(rng: np.random.Generator, *shape: int) -> Array:
    """Files have some negative scales, and scales of 0 for rows of zeros."""
    return normal(rng, *shape) * (rng.random(shape, np.float32) > 0.05)


def with_zero_rows(rng: np.random.Generator, m: int, k: int) -> Array:
    return normal(rng, m, k) * (np.arange(m) % 3 > 0)[:, None]


def halves(rng: np.random.Generator, m: int, k: int) -> Array:
    """The largest is 127, so that qvalues equal the numbers, and half of the numbers are between two integers."""
    values = rng.integers(-126, 126, (m, k)) + np.float32(0.5)
    values[:, 0] = 127
    return values


ROWS: dict[str, Callable[[np.random.Generator, int, int], Array]] = {
    "normal": normal,
    "one large number": lambda rng, m, k: normal(rng, m, k) * np.where(np.arange(k) == k // 2, 1e4, 1),
    "zeros": lambda rng, m, k: np.zeros((m, k), np.float32),
    "rows of zeros": with_zero_rows,
    "halves": halves,
    "all the largest": lambda rng, m, k: np.full((m, k), -3.0, np.float32),
    "tiny": lambda rng, m, k: normal(rng, m, k) * np.float32(1e-33),
    "large": lambda rng, m, k: np.clip(normal(rng, m, k) * 1e4, -6e4, 6e4),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ROWS)
def test_w8a8_bits_equal_numpy(isa_of_codes: str, kind: str, dtype: str) -> None:
    for x, qvalues, scales, expected in products(kind, dtype):
        bits = linear(x, quantized(qvalues, scales, dtype), "float32").bits
        assert np.array_equal(bits, expected), (*x.array.shape, len(qvalues))


@functools.cache  # for all instruction sets
def products(kind: str, dtype: str) -> list[tuple[Typed, Array, Array, Array]]:
    """Rows, qvalues and scales of each shape, and the bits of NumPy's results."""
    rng = np.random.default_rng(1)
    found = []
    for m, n, k in SHAPES:
        qvalues, scales = random_weight(rng, n, k)
        x = typed(ROWS[kind](rng, m, k), dtype)
        found.append((x, qvalues, scales, quantized_products.w8a8(x.values, qvalues, scales).view(np.uint32)))
    return found


@settings(max_examples=40)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 70),
    k=st.integers(1, 400),
    spread=st.integers(0, 60),
    isa=st.sampled_from(isas_of_qvalues() or ["plain"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_w8a8_bits_equal_numpy_for_any_spread(m: int, n: int, k: int, spread: int, isa: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    qvalues, scales = random_weight(rng, n, k)
    x = typed(np.ldexp(normal(rng, m, k), rng.integers(-spread, spread + 1, (m, k))), "bfloat16")
    with library.use_isa(isa):
        bits = linear(x, quantized(qvalues, scales, "bfloat16"), "float32").bits
    assert np.array_equal(bits, quantized_products.w8a8(x.values, qvalues, scales).view(np.uint32))


@pytest.mark.parametrize(("code", "other"), [(-128, -128), (127, 127), (-128, 127)])
def test_w8a8_largest_sums_fit_int32(isa_of_codes: str, code: int, other: int) -> None:
    qvalues = np.full((18, MOST_INPUTS), code, np.int8)
    qvalues[1::2, ::2] = other
    scales = np.ones(18, np.float32)
    x = typed(np.where(np.arange(2)[:, None] == 0, 127.0, -127.0) * np.ones((2, MOST_INPUTS)), "float32")
    y = linear(x, quantized(qvalues, scales, "float32"))
    assert np.array_equal(y.array, (x.array.astype(np.float64) @ qvalues.T.astype(np.float64)).astype(np.float32))


def test_w8a8_refuses_too_many_inputs() -> None:
    with pytest.raises(ValueError, match="no product supports"):
        quantized(np.ones((1, MOST_INPUTS + 1), np.int8), np.ones(1), "float32")


@pytest.mark.parametrize(("n", "k"), [(200, 512), (40, 1111), (40, 4100)])
def test_w8a8_is_batch_invariant(isa_of_codes: str, n: int, k: int) -> None:
    rng = np.random.default_rng(2)
    weight = quantized(*random_weight(rng, n, k), "bfloat16")
    x = typed(normal(rng, 300, k), "bfloat16")
    with library.use_threads(1):
        alone = np.concatenate([linear(x.rows([i]), weight, "float32").bits for i in range(0, 300, 17)])
    # With loops for its instructions a set takes seconds for what others take milliseconds.
    is_emulated = library.load().llm_isa().decode() == EMULATED
    for threads in (5,) if is_emulated else (1, 2, 5):
        with library.use_threads(threads):
            for m in BATCHES if not is_emulated or n * k < MOST_EMULATED else BATCHES[:-2]:
                y = linear(x.rows(slice(m)), weight, "float32").bits
                assert np.array_equal(y[::17], alone[: len(y[::17])]), (threads, m)


@pytest.mark.parametrize("m", [1, 9, 40])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_w8a8_row_with_infinity_or_nan_becomes_nan(isa_of_codes: str, value: float, m: int) -> None:
    rng = np.random.default_rng(5)
    x, weight = normal(rng, m, 70), quantized(*random_weight(rng, 50, 70), "bfloat16")
    clean, row = linear(typed(x, "bfloat16"), weight, "float32"), m // 2
    x[row, 69] = value
    y = linear(typed(x, "bfloat16"), weight, "float32")
    assert np.all(np.isnan(y.array[row]))
    assert np.array_equal(np.delete(y.bits, row, axis=0), np.delete(clean.bits, row, axis=0))


def test_w8a8_product_equals_the_reference_up_to_half_a_step(isa_of_codes: str) -> None:
    """Weights have errors of half their scale, rows of half theirs, and both a little for the rounding of scales."""
    rng = np.random.default_rng(3)
    for m, n, k in SHAPES:
        x, weight = typed(normal(rng, m, k), "bfloat16"), normal(rng, n, k)
        tensor = quantize_w8(weight)
        y = linear(x, quantized(tensor.qvalues, tensor.scales[:, 0], "bfloat16"), "float32")
        row_errors = np.abs(x.values).max(axis=1, keepdims=True) / 254 * np.ones((1, k))
        weight_errors = tensor.scales / 2 * np.ones((1, k))
        magnitude = np.abs(x.values).astype(np.float64), np.abs(weight).astype(np.float64)
        bound = row_errors @ (magnitude[1] + weight_errors).T + magnitude[0] @ weight_errors.T
        assert_close(y, reference.linear(x.values, weight), 1.001 * bound)


def test_w8a8_embedding_dequantizes_rows() -> None:
    rng = np.random.default_rng(8)
    qvalues, scales = random_weight(rng, 50, 33)
    rows, y = rng.integers(0, 50, 9), empty((9, 33), "bfloat16")
    table = quantized(qvalues, scales, "bfloat16")
    call("Gather", table, integers(rows), scalar(0, "int64"), scalar(0, "int64"), y)
    assert np.array_equal(y.bits, typed(qvalues[rows] * scales[rows, None], "bfloat16").bits)


def test_w8a8_refuses_rows_of_another_type() -> None:
    weight, y = quantized(np.ones((4, 8), np.int8), np.ones(4), "bfloat16"), empty((2, 4), "float32")
    x = typed(np.ones((2, 8)), "float32")
    assert status_of("MatMul", x, weight, scalar(False, "bool"), scalar(True, "bool"), y) != 0
    assert library.last_error() == "MatMul: both inputs must be float32, float16 or bfloat16, of one type"


def test_w8a8_accepts_empty_input() -> None:
    weight = quantized(np.ones((20, 8), np.int8), np.ones(20), "float32")
    assert linear(typed(np.ones((0, 8)), "float32"), weight).array.shape == (0, 20)
    no_inputs = quantized(np.ones((20, 0), np.int8), np.ones(20), "float32")
    assert np.array_equal(linear(typed(np.ones((3, 0)), "float32"), no_inputs).array, np.zeros((3, 20)))
