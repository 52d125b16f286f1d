"""W4A8 products: bit-identical to NumPy on every instruction set."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.kernels import library
from llm_serving_tools.quantized_parts import quantize_w4
from support.instruction_sets import isas_of_qvalues, real_isas
from support.kernel_calls import Array, Typed, assert_close, call, empty, integers, linear, quantized, scalar, typed
from support.kernels import quantized_products, reference

pytestmark = pytest.mark.skipif(not real_isas(), reason="needs a compiler")

SHAPES = [(1, 16, 32), (2, 1, 64), (3, 50, 160), (5, 33, 96), (7, 200, 96), (19, 100, 2336), (40, 130, 544)]
BATCHES = (1, 2, 6, 7, 18, 19, 64, 300)
MOST_INPUTS = 65536


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32)


def random_tensor(
    rng: np.random.Generator, n: int, k: int, group_size: int, has_zeros: bool, rotated: bool = False
) -> QuantizedTensor:
    groups = max(1, -(-k // group_size))
    zeros = rng.integers(0, 16, (n, groups), np.uint8) if has_zeros else None
    scales = normal(rng, n, groups) * (rng.random((n, groups), np.float32) > 0.05)  # below zero, and 0, as files have
    return QuantizedTensor(rng.integers(0, 16, (n, k), np.uint8), scales, zeros, 4, group_size, rotated=rotated)


def placed(tensor: QuantizedTensor, dtype: str) -> Typed:
    arrays = tensor.qvalues, tensor.scales, dtype
    return quantized(*arrays, zeros=tensor.zeros, group_size=tensor.group_size, rotated=tensor.rotated)


def expected(x: Typed, tensor: QuantizedTensor) -> Array:
    return quantized_products.w4a8(
        x.values, tensor.qvalues, tensor.scales, tensor.zeros, tensor.group_size, tensor.rotated
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_w4a8_bits_equal_numpy(isa_of_codes: str, has_zeros: bool, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for m, n, k in SHAPES:
        tensor = random_tensor(rng, n, k, 32, has_zeros, rotated=not has_zeros)
        x = typed(normal(rng, m, k) * (np.arange(m) % 3 > 0)[:, None], dtype)
        bits = linear(x, placed(tensor, dtype), "float32").bits
        assert np.array_equal(bits, expected(x, tensor).view(np.uint32)), (m, n, k)


@settings(max_examples=40)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 70),
    k=st.integers(1, 700),
    group=st.sampled_from((None, 32, 64, 128, 512)),
    has_zeros=st.booleans(),
    rotated=st.booleans(),
    spread=st.integers(0, 60),
    isa=st.sampled_from(isas_of_qvalues() or ["plain"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_w4a8_bits_equal_numpy_for_any_groups(
    m: int, n: int, k: int, group: int | None, has_zeros: bool, rotated: bool, spread: int, isa: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tensor = random_tensor(rng, n, k, group or k, has_zeros, rotated)
    x = typed(np.ldexp(normal(rng, m, k), rng.integers(-spread, spread + 1, (m, k))), "bfloat16")
    with library.use_isa(isa):
        bits = linear(x, placed(tensor, "bfloat16"), "float32").bits
    assert np.array_equal(bits, expected(x, tensor).view(np.uint32))


@pytest.mark.parametrize("zero", [0, 15])
def test_w4a8_largest_sums_fit_int32(isa_of_codes: str, zero: int) -> None:
    qvalues = np.full((18, MOST_INPUTS), 15 - zero, np.uint8)
    tensor = QuantizedTensor(qvalues, np.ones((18, 1), np.float32), np.full((18, 1), zero, np.uint8), 4, MOST_INPUTS)
    x = typed(np.where(np.arange(2)[:, None] == 0, 127.0, -127.0) * np.ones((2, MOST_INPUTS)), "float32")
    y = linear(x, placed(tensor, "float32"))
    assert np.array_equal(y.array, (x.array.astype(np.float64) @ tensor.dequantized().T).astype(np.float32))


def test_w4a8_refuses_too_many_inputs_and_other_groups() -> None:
    for k, group in ((MOST_INPUTS + 32, MOST_INPUTS + 32), (96, 48), (96, 16)):
        with pytest.raises(ValueError, match="no product supports"):
            quantized(np.ones((1, k), np.uint8), np.ones((1, -(-k // group))), "float32", group_size=group)


@pytest.mark.parametrize(("n", "k", "group"), [(200, 512, 128), (72, 1120, 32), (40, 4128, 4096)])
def test_w4a8_is_batch_invariant(isa_of_codes: str, n: int, k: int, group: int) -> None:
    rng = np.random.default_rng(2)
    weight = placed(random_tensor(rng, n, k, group, has_zeros=False), "bfloat16")
    x = typed(normal(rng, 300, k), "bfloat16")
    with library.use_threads(1):
        alone = np.concatenate([linear(x.rows([i]), weight, "float32").bits for i in range(0, 300, 17)])
    for threads in (1, 2):
        with library.use_threads(threads):
            for m in BATCHES:
                y = linear(x.rows(slice(m)), weight, "float32").bits
                assert np.array_equal(y[::17], alone[: len(y[::17])]), (threads, m)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_w4a8_row_with_infinity_or_nan_becomes_nan(isa_of_codes: str, value: float) -> None:
    rng = np.random.default_rng(5)
    x, weight = normal(rng, 9, 96), placed(random_tensor(rng, 50, 96, 32, has_zeros=True), "bfloat16")
    clean = linear(typed(x, "bfloat16"), weight, "float32")
    x[4, 95] = value
    y = linear(typed(x, "bfloat16"), weight, "float32")
    assert np.all(np.isnan(y.array[4]))
    assert np.array_equal(np.delete(y.bits, 4, axis=0), np.delete(clean.bits, 4, axis=0))


def test_w4a8_product_equals_the_values_up_to_half_a_step(isa_of_codes: str) -> None:
    rng = np.random.default_rng(3)
    for m, n, k in SHAPES:
        x, tensor = typed(normal(rng, m, k), "bfloat16"), quantize_w4(normal(rng, n, k), 32)
        values = tensor.dequantized().astype(np.float64)
        row_errors = np.abs(x.values).max(axis=1, keepdims=True) / 254 * np.ones((1, k))
        y = linear(x, placed(tensor, "bfloat16"), "float32")
        assert_close(y, reference.linear(x.values, values), 1.001 * row_errors @ np.abs(values).T)


def test_w4a8_embedding_dequantizes_rows() -> None:
    rng = np.random.default_rng(8)
    tensor = random_tensor(rng, 50, 96, 32, has_zeros=True)
    rows, y = rng.integers(0, 50, 9), empty((9, 96), "bfloat16")
    call("Gather", placed(tensor, "bfloat16"), integers(rows), scalar(0, "int64"), scalar(0, "int64"), y)
    assert np.array_equal(y.bits, typed(tensor.dequantized()[rows], "bfloat16").bits)
