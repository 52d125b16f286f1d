"""Products of rows with 8-bit and 4-bit weights that are widened to the element type of the rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_serving.formats.quantized_tensor import QuantizedTensor
from llm_serving.kernels import library
from llm_serving_tools.quantized_parts import quantize_w4, quantize_w8
from support.asymmetric import asymmetric_w4
from support.instruction_sets import isas, real_isas
from support.kernel_calls import (
    FIXED_POINT_ISA,
    FLOAT32_UNIT,
    FLOAT_TYPES,
    Array,
    Typed,
    assert_close,
    call,
    empty,
    float32_sum_bound,
    integers,
    linear,
    packed,
    quantized,
    scalar,
    typed,
)
from support.kernels import reference

pytestmark = pytest.mark.skipif(not real_isas(), reason="needs a compiler")

BATCHES = (1, 2, 6, 7, 18, 19, 24, 64, 128, 300)
KINDS = ("8 bits", "4 bits", "4 bits with zeros")
SHAPES = [(1, 16, 64), (2, 1, 32), (3, 50, 160), (7, 200, 96), (19, 100, 1120), (40, 130, 544)]


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32)


def tensor_of(kind: str, weight: Array, group_size: int = 32) -> QuantizedTensor:
    if kind == "8 bits":
        return quantize_w8(weight)
    return quantize_w4(weight, group_size) if kind == "4 bits" else asymmetric_w4(weight, group_size)


def placed(tensor: QuantizedTensor, dtype: str) -> Typed:
    arrays = tensor.qvalues, tensor.scales, dtype
    return quantized(*arrays, weight_only=True, zeros=tensor.zeros, group_size=tensor.group_size)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_weight_only_product_equals_the_reference_up_to_rounding(isa: str, kind: str, dtype: str) -> None:
    rng = np.random.default_rng(1)
    for m, n, k in SHAPES:
        x, tensor = typed(normal(rng, m, k), dtype), tensor_of(kind, normal(rng, n, k) + np.float32(0.5))
        exact = tensor.dequantized().astype(np.float64)
        # Beside a product's own sums: a scaled sum of each group, and its addition.
        bound = float32_sum_bound(x, Typed(exact, "float32"))
        bound += 2 * tensor.num_groups * FLOAT32_UNIT * (np.abs(x.values).astype(np.float64) @ np.abs(exact).T)
        assert_close(linear(x, placed(tensor, dtype), "float32"), reference.linear(x.values, exact), bound)


@settings(max_examples=40)
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 70),
    k=st.integers(1, 300),
    bits=st.sampled_from((4, 8)),
    group=st.sampled_from((None, 32, 64, 128)),
    dtype=st.sampled_from(FLOAT_TYPES),
    isa=st.sampled_from(isas() or ["plain"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_weight_only_product_of_small_integers_is_exact(
    m: int, n: int, k: int, bits: int, group: int | None, dtype: str, isa: str, seed: int
) -> None:
    """For any length of the last group."""
    rng = np.random.default_rng(seed)
    groups = 1 if group is None else -(-k // group)
    qvalues = rng.integers(0, 16, (n, k), np.uint8) if bits == 4 else rng.integers(-128, 128, (n, k), np.int8)
    zeros = rng.integers(0, 16, (n, groups), np.uint8) if bits == 4 else None
    scales = 2.0 ** rng.integers(-2, 3, (n, groups)) * rng.integers(-1, 2, (n, groups))
    x = rng.integers(-4, 5, (m, k))
    of_input = np.arange(k) // (group or k)
    values = (qvalues.astype(np.float64) - (0 if zeros is None else zeros[:, of_input])) * scales[:, of_input]
    with library.use_isa(isa):
        weight = quantized(qvalues, scales, dtype, weight_only=True, zeros=zeros, group_size=group)
        assert np.array_equal(linear(typed(x, dtype), weight, "float32").array, x @ values.T)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(200, 512), (40, 2080)])
def test_weight_only_product_is_batch_invariant(isa: str, n: int, k: int, kind: str, dtype: str) -> None:
    rng = np.random.default_rng(2)
    weight, x = placed(tensor_of(kind, normal(rng, n, k)), dtype), typed(normal(rng, 300, k), dtype)
    with library.use_threads(1):
        alone = np.concatenate([linear(x.rows([i]), weight, "float32").bits for i in range(0, 300, 37)])
    for threads in (1, 2):
        with library.use_threads(threads):
            for m in BATCHES:
                y = linear(x.rows(slice(m)), weight, "float32").bits
                assert np.array_equal(y[::37], alone[: len(y[::37])]), (threads, m)
            second = linear(x.rows(slice(36, 38)), weight, "float32").bits[1:]  # row 37 as the second of two
            assert np.array_equal(second, alone[1:2]), threads


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weight_only_product_without_groups_equals_dense_values(isa: str, dtype: str) -> None:
    if (isa, dtype) == (FIXED_POINT_ISA, "bfloat16"):
        pytest.skip("multiplies bfloat16 in integers where they are weights")
    rng = np.random.default_rng(3)
    tensor, x = quantize_w8(normal(rng, 70, 300)), typed(normal(rng, 33, 300), dtype)
    elements = packed(typed(tensor.qvalues, dtype))
    expected = linear(x, elements, "float32").array * tensor.scales[:, 0]
    assert np.array_equal(linear(x, placed(tensor, dtype), "float32").array, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_weight_only_embedding_dequantizes_rows(kind: str, dtype: str) -> None:
    rng = np.random.default_rng(8)
    tensor = tensor_of(kind, normal(rng, 50, 96))
    rows, y = rng.integers(0, 50, 9), empty((9, 96), dtype)
    call("Gather", placed(tensor, dtype), integers(rows), scalar(0, "int64"), scalar(0, "int64"), y)
    assert np.array_equal(y.bits, typed(tensor.dequantized()[rows], dtype).bits)


@pytest.mark.parametrize("group", [16, 48, 33])
def test_weight_only_packing_refuses_unsupported_groups(group: int) -> None:
    with pytest.raises(ValueError, match="no product supports"):
        quantized(
            np.ones((4, 480), np.uint8), np.ones((4, -(-480 // group))), "float32", weight_only=True, group_size=group
        )
