"""DynamicQuantExt, QuantBatchMatmul, and MatMul and Gather of qvalues: bit-identical to NumPy on every instruction
set."""

import numpy as np
import pytest
from llm_serving.kernels import library
from support.instruction_sets import real_isas
from support.kernel_calls import Array, Typed, call, empty, integers, quantized, scalar, status_of, typed, unpacked
from support.kernels import quantized_products

pytestmark = pytest.mark.skipif(not real_isas(), reason="needs a compiler")

SHAPES = [(1, 16, 32), (1, 1, 1), (3, 50, 65), (19, 100, 2311), (130, 40, 515)]


def weight_of(rng: np.random.Generator, n: int, k: int) -> tuple[Array, Array]:
    return rng.integers(-127, 128, (n, k)).astype(np.int8), rng.random(n, np.float32) + np.float32(1e-3)


def encoded(x: Typed) -> tuple[Typed, Typed]:
    qvalues, scales = empty(x.array.shape, "int8"), empty(x.array.shape[:-1], "float32")
    call("DynamicQuantExt", x, None, qvalues, scales)
    return qvalues, scales


def arguments(rows: Typed, weight: Typed, scale: Typed, row_scale: Typed | None, y: Typed) -> tuple[Typed | None, ...]:
    fixed = scalar(False, "bool"), scalar(True, "bool"), scalar(0, "int64")
    return rows, weight, scale, None, None, row_scale, *fixed, y


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_quantize_rows_equals_numpy(isa: str, dtype: str) -> None:
    rng = np.random.default_rng(3)
    for m, _, k in SHAPES:
        values = rng.standard_normal((m, k))
        values[m // 2] *= 0 if m > 1 else 1
        values[-1, 0] = np.inf if m > 2 else 1
        x = typed(values, dtype)
        qvalues, scales = encoded(x)
        expected, expected_scales = quantized_products.quantize_rows(x.values)
        assert np.array_equal(qvalues.array, expected)
        assert np.array_equal(scales.array, expected_scales, equal_nan=True)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_quantized_product_bits_equal_numpy(isa: str, dtype: str, is_packed: bool) -> None:
    rng = np.random.default_rng(4)
    for m, n, k in SHAPES:
        qvalues, scales = weight_of(rng, n, k)
        x = typed(rng.standard_normal((m, k)), dtype)
        # What was packed with other scales is multiplied by those of the call.
        weight = quantized(qvalues, np.ones(n), dtype) if is_packed else unpacked(Typed(qvalues, "int8"))
        rows, row_scales = encoded(x)
        y = empty((m, n), dtype)
        call("QuantBatchMatmul", *arguments(rows, weight, typed(scales, "float32"), row_scales, y))
        expected = quantized_products.w8a8(x.values, qvalues, scales)
        assert np.array_equal(y.bits, typed(expected, dtype).bits), (m, n, k)
        sums = empty((m, n), "float32")
        call("MatMul", rows, weight, scalar(False, "bool"), scalar(True, "bool"), sums)
        assert np.array_equal(sums.array * scales * row_scales.array[:, None], expected), (m, n, k)


def test_quantized_product_with_scales_of_the_row_type() -> None:
    qvalues, scales = weight_of(np.random.default_rng(5), 33, 40)
    rounded, y = typed(scales, "bfloat16"), empty((1, 33), "bfloat16")
    rows = Typed(np.arange(40, dtype=np.int8)[None] - 20, "int8")
    call("QuantBatchMatmul", *arguments(rows, unpacked(Typed(qvalues, "int8")), rounded, None, y))
    sums = (rows.array.astype(np.int32) @ qvalues.T.astype(np.int32)).astype(np.float32)
    assert np.array_equal(y.bits, typed(sums * rounded.values, "bfloat16").bits)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gather_of_a_packed_table_returns_quantized_values(dtype: str) -> None:
    qvalues, scales = weight_of(np.random.default_rng(6), 37, 70)
    table, y = quantized(qvalues, scales, dtype), empty((3, 70), "int8")
    call("Gather", table, integers([36, 0, 17]), scalar(0, "int64"), scalar(0, "int64"), y)
    assert np.array_equal(y.array, qvalues[[36, 0, 17]])


def test_quantized_operators_refuse_unsupported_arguments() -> None:
    qvalues, scales = weight_of(np.random.default_rng(7), 16, 32)
    weight, scale = unpacked(Typed(qvalues, "int8")), typed(scales, "float32")
    rows, row_scale = encoded(typed(np.ones((2, 32)), "bfloat16"))
    y = empty((2, 16), "bfloat16")
    given = list(arguments(rows, weight, scale, row_scale, y))
    four_bits = quantized(np.ones((16, 64), np.uint8), np.ones((16, 1)), "bfloat16")
    cases = [
        (0, typed(np.ones((2, 32)), "bfloat16"), "codes must be int8"),
        (0, Typed(np.ones((2, 30), np.int8), "int8"), "shapes [2, 30] x [16, 32] do not fit"),
        (1, four_bits, "the weight is not kept as W8A8"),
        (2, typed(np.ones(15), "float32"), "there must be a scale for each of 16 columns"),
        (2, None, "scale must be given"),
        (3, scale, "offset and bias must be None"),
        (5, typed(np.ones(3), "float32"), "there must be a scale of float32 for each of 2 rows"),
        (7, scalar(False, "bool"), "x1 * x2^T is computed only"),
        (9, integers(np.ones((2, 16))), "the result must be float32, float16 or bfloat16"),
    ]
    for at, other, message in cases:
        assert status_of("QuantBatchMatmul", *given[:at], other, *given[at + 1 :]) == 1
        assert library.load().llm_last_error().decode() == f"QuantBatchMatmul: {message}"
    x = typed(np.ones((2, 32)), "bfloat16")
    assert status_of("DynamicQuantExt", x, typed(np.ones(32), "bfloat16"), rows, row_scale) == 1
