"""Rows and weights that are rotated before they are rounded: bits are NumPy's, products those without rotation."""

import numpy as np
import pytest
from llm_serving.backends.weight_packing import quantize
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.kernels import library
from support.instruction_sets import real_isas
from support.kernel_calls import Array, Typed, call, empty, integers, linear, quantized, scalar, typed
from support.kernels import quantized_products

pytestmark = pytest.mark.skipif(not real_isas(), reason="needs a compiler")

SHAPES = [(1, 16, 32), (1, 1, 1), (2, 64, 300), (3, 50, 80), (5, 33, 18), (7, 200, 96), (19, 100, 2304), (40, 130, 544)]


def placed(tensor: QuantizedTensor, dtype: str, *, weight_only: bool = False) -> Typed:
    arrays = tensor.qvalues, tensor.scales, dtype
    return quantized(*arrays, weight_only=weight_only, group_size=tensor.group_size, rotated=tensor.rotated)


def with_outliers(rng: np.random.Generator, *shape: int) -> Array:
    values = rng.standard_normal(shape, dtype=np.float32)
    values[:, :: max(1, shape[1] // 3)] *= 50
    return values


@pytest.mark.parametrize(("size", "block"), [(896, 128), (4864, 128), (80, 16), (96, 32), (100, 1), (8, 1), (0, 1)])
def test_rotation_block_is_the_largest_power_of_two_that_divides_the_row(size: int, block: int) -> None:
    assert quantized_products.rotated_block(size) == block
    x = np.random.default_rng(1).integers(-9, 9, (3, size)).astype(np.float32)
    assert np.array_equal(quantized_products.rotate(quantized_products.rotate(x)), block * x)


def test_rotation_spreads_an_outlier_over_its_block() -> None:
    x = np.zeros((1, 256), np.float32)
    x[0, 130] = 3
    rotated = quantized_products.rotate(x)
    assert (np.abs(rotated[0, 128:]) == 3).all() and not rotated[0, :128].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rotated_w8a8_bits_equal_numpy(isa_of_codes: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for m, n, k in SHAPES:
        values = with_outliers(rng, m, k)
        values[m // 2] *= 0
        qvalues, scales = rng.integers(-128, 128, (n, k)).astype(np.int8), rng.standard_normal(n).astype(np.float32)
        x, weight = typed(values, dtype), quantized(qvalues, scales, dtype, rotated=True)
        expected = quantized_products.w8a8(x.values, qvalues, scales, rotated=True)
        assert np.array_equal(linear(x, weight, "float32").bits, expected.view(np.uint32)), (m, n, k)


@pytest.mark.parametrize("value", [np.inf, np.nan, 3e38])
def test_rotated_rows_that_overflow_become_nan(isa_of_codes: str, value: float) -> None:
    rng = np.random.default_rng(5)
    x, weight = with_outliers(rng, 3, 64), rng.standard_normal((20, 64), dtype=np.float32)
    x[1] = value
    y = linear(typed(x, "float32"), placed(quantize(weight, 8, rotates=True), "float32"), "float32").array
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize(("bits", "weight_only", "limit"), [(8, False, 0.02), (4, False, 0.15), (4, True, 0.15)])
def test_rotated_products_are_more_accurate(isa: str, bits: int, weight_only: bool, limit: float) -> None:
    rng = np.random.default_rng(2)
    for m, n, k in [(1, 50, 256), (20, 96, 1152), (3, 17, 96)]:
        x, weight = typed(with_outliers(rng, m, k), "bfloat16"), with_outliers(rng, n, k)
        exact = x.values.astype(np.float64) @ weight.T
        errors = []
        for rotates in (True, False):
            tensor = quantize(weight, bits, 32 if bits == 4 else None, rotates)
            y = linear(x, placed(tensor, "bfloat16", weight_only=weight_only), "float32").array
            errors.append(float(np.linalg.norm(y - exact) / np.linalg.norm(exact)))
        assert errors[0] < min(limit, errors[1])


@pytest.mark.parametrize("bits", [8, 4])
def test_embedding_of_a_rotated_weight_has_its_rows(bits: int) -> None:
    rng = np.random.default_rng(8)
    tensor = quantize(with_outliers(rng, 50, 96), bits, 32 if bits == 4 else None, rotates=True)
    rows, y = rng.integers(0, 50, 9), empty((9, 96), "bfloat16")
    call("Gather", placed(tensor, "bfloat16"), integers(rows), scalar(0, "int64"), scalar(0, "int64"), y)
    assert np.array_equal(y.bits, typed(quantized_products.rotate(tensor.dequantized())[rows], "bfloat16").bits)


@pytest.mark.parametrize("bits", [8, 4])
def test_rotated_products_are_batch_invariant(isa_of_codes: str, bits: int) -> None:
    rng = np.random.default_rng(3)
    for weight_only in (False, True):
        tensor = quantize(with_outliers(rng, 70, 640), bits, 64 if bits == 4 else None, rotates=True)
        x, weight = typed(with_outliers(rng, 130, 640), "bfloat16"), placed(tensor, "bfloat16", weight_only=weight_only)
        with library.use_threads(2):
            whole = linear(x, weight, "float32").bits
            for part in (slice(0, 1), slice(5, 12), slice(40, 130)):
                assert np.array_equal(linear(x.rows(part), weight, "float32").bits, whole[part])
