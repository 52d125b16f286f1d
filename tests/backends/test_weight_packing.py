import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from llm_serving.backends.weight_packing import quantize
from llm_serving.errors import ModelError
from llm_serving.formats.stored_tensor import to_float32
from llm_serving_tools.quantized_parts import quantize_w4, quantize_w8
from support.instruction_sets import real_isas
from support.kernels import quantized_products

pytestmark = pytest.mark.skipif(not real_isas(), reason="needs a compiler")

BITS_OF = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}


def assert_is_that_of_numpy(weight: np.ndarray) -> None:
    expected = [(quantize_w8(weight), quantize(weight, 8))]
    block = quantized_products.rotated_block(weight.shape[1])
    rotated = quantized_products.rotate(to_float32(weight)) / np.float32(block)
    if np.isfinite(rotated).all():
        expected += [(quantize_w8(rotated), quantize(weight, 8, rotates=True))]
    expected += [(quantize_w4(weight, size), quantize(weight, 4, size)) for size in (32, 64)]
    for by_numpy, found in expected:
        assert found.zeros is None
        assert (found.bits, found.group_size) == (by_numpy.bits, by_numpy.group_size)
        assert np.array_equal(found.qvalues, by_numpy.qvalues)
        assert np.array_equal(found.scales.view(np.uint32), by_numpy.scales.view(np.uint32))


@pytest.mark.parametrize("shape", [(1, 64), (50, 192), (3, 8256)])
@pytest.mark.parametrize("dtype", BITS_OF)
def test_quantize_equals_numpy_for_normal_numbers(dtype: str, shape: tuple[int, int]) -> None:
    values = np.random.default_rng(1).standard_normal(shape, np.float32)
    values[0, :32] = 0
    upper = (values.view(np.uint32) >> 16).astype(np.uint16)
    assert_is_that_of_numpy(upper if dtype == "bfloat16" else values.astype(dtype))


@settings(max_examples=100)
@given(data=st.data(), dtype=st.sampled_from(tuple(BITS_OF)))
def test_quantize_equals_numpy_for_any_bits(data: st.DataObject, dtype: str) -> None:
    """Includes subnormal numbers, the largest numbers, and ties between quantized values."""
    bits = data.draw(arrays(BITS_OF[dtype], (3, 64)))
    weight = bits if dtype == "bfloat16" else bits.view(dtype)
    if np.isfinite(to_float32(weight)).all():
        assert_is_that_of_numpy(weight)
    else:
        for width, size in ((8, None), (4, 32)):
            with pytest.raises(ModelError, match="finite numbers only"):
                quantize(weight, width, size)


@pytest.mark.parametrize("largest", [127.0, 7.5, 2.0**-126 * 127, 2.0**-126 * 7.5, 2.0**-140])
def test_quantize_rounds_ties_as_numpy(largest: float) -> None:
    steps = np.arange(-128, 128, dtype=np.float32) / 2
    assert_is_that_of_numpy((np.stack([steps, -steps]) / 64 * np.float32(largest)).astype(np.float32))


def test_quantize_accepts_empty_matrices() -> None:
    assert quantize(np.zeros((0, 64), np.float32), 8).shape == (0, 64)
    assert np.array_equal(quantize(np.zeros((3, 0), np.float32), 8).scales, np.ones((3, 1)))


@pytest.mark.parametrize(("shape", "size", "rule"), [((64,), None, "a matrix"), ((2, 64), 48, "must divide the 64")])
def test_quantize_refuses_other_shapes_and_groups(shape: tuple[int, ...], size: int | None, rule: str) -> None:
    with pytest.raises(ModelError, match=rule):
        quantize(np.zeros(shape, np.float32), 4, size)
