import numpy as np
import pytest
from llm_serving.errors import ModelError
from llm_serving.formats import quantized_tensor
from llm_serving.formats.quantized_tensor import QuantizedTensor, group_of_columns
from llm_serving_tools.quantized_parts import STEPS, quantize_w4, quantize_w8
from support.asymmetric import asymmetric_w4
from support.model_factories import from_bfloat16, to_bfloat16


def matrix(rows=5, columns=64, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(rows, columns)) * 10.0 ** rng.integers(-3, 3, (rows, 1))).astype(np.float32)


def one_by_one(tensor: QuantizedTensor) -> np.ndarray:
    """Compute the definition element by element."""
    values = np.empty(tensor.shape, np.float32)
    for i, j in np.ndindex(*tensor.shape):
        group = j // tensor.group_size if tensor.g_idx is None else tensor.g_idx[j]
        zero = 8 if tensor.bits == 4 else 0
        zero = zero if tensor.zeros is None else int(tensor.zeros[i, group])
        values[i, j] = np.float32(int(tensor.qvalues[i, j]) - zero) * tensor.scales[i, group]
    return values


@pytest.fixture(params=[None, 100], ids=["at once", "in blocks"])
def at_once(request, monkeypatch):
    if request.param:
        monkeypatch.setattr(quantized_tensor, "_AT_ONCE", request.param)


QUANTIZERS = [
    quantize_w8,
    lambda w: quantize_w4(w, 16),
    lambda w: quantize_w4(w, 64),
]


@pytest.mark.parametrize("quantize", [quantize_w8, lambda w: asymmetric_w4(w, 32)])
def test_quantized_tensor_is_within_half_a_scale(quantize, at_once):
    weight = matrix()
    weight[3] = 0
    tensor = quantize(weight)
    assert np.array_equal(tensor.dequantized(), one_by_one(tensor))
    bound = np.repeat(tensor.scales, tensor.group_size, axis=1) * np.float32(0.500001)
    assert (np.abs(tensor.dequantized() - weight) <= bound).all()
    assert (tensor.dequantized()[3] == 0).all()


def test_symmetric_4_bits_have_the_smallest_error_without_smaller_results(at_once):
    weight = matrix()
    weight[3] = 0
    groups = weight.reshape(len(weight), -1, 32)
    tensor = quantize_w4(weight, 32)
    assert np.array_equal(tensor.dequantized(), one_by_one(tensor))
    found = np.square(tensor.dequantized() - weight).reshape(groups.shape).sum(axis=2)
    at = np.abs(groups).argmax(axis=2)
    largest = np.take_along_axis(groups, at[..., None], axis=2)
    for step in STEPS:
        scale = np.where(largest == 0, 1, largest / np.float32(step))
        others = np.square(np.clip(np.rint(groups / scale), -8, 7) * scale - groups).sum(axis=2)
        share = others / np.maximum(np.square(groups).sum(axis=2), 1e-30)
        assert (found <= others / (1 - share) * 1.0001 + 1e-12).all()
    assert (tensor.dequantized()[3] == 0).all()
    products = (tensor.dequantized() * weight).reshape(groups.shape).sum(axis=2)
    np.testing.assert_allclose(products, np.square(groups).sum(axis=2), rtol=1e-5)


def test_quantized_tensor_supports_act_order():
    rng = np.random.default_rng(1)
    qvalues = rng.integers(0, 16, (3, 8)).astype(np.uint8)
    scales = rng.normal(size=(3, 2)).astype(np.float32)
    zeros = rng.integers(0, 16, (3, 2)).astype(np.uint8)
    tensor = QuantizedTensor(qvalues, scales, zeros, 4, 4, np.array([1, 0, 0, 1, 1, 0, 1, 0], np.int32))
    assert np.array_equal(tensor.dequantized(), one_by_one(tensor))


def test_quantized_tensor_supports_a_short_last_group():
    tensor = QuantizedTensor(np.ones((2, 5), np.int8), np.array([[1, 2], [3, 4]], np.float32), None, 8, 4)
    assert tensor.dequantized().tolist() == [[1, 1, 1, 1, 2], [3, 3, 3, 3, 4]]


def test_quantized_values_use_their_range():
    assert (np.abs(quantize_w8(matrix()).qvalues.astype(int)).max(axis=1) == 127).all()
    assert quantize_w4(matrix(), 64).qvalues.min() == 0


@pytest.mark.parametrize("quantize", QUANTIZERS)
def test_quantize_is_independent_of_the_stored_type(quantize):
    bits = to_bfloat16(matrix())
    assert np.array_equal(quantize(bits).qvalues, quantize(from_bfloat16(bits)).qvalues)


@pytest.mark.parametrize("quantize", QUANTIZERS)
@pytest.mark.parametrize("value", [1e-45, 1e-38, 3e38, 0.0])
def test_quantize_keeps_extreme_values_finite(quantize, value):
    weight = np.full((2, 64), value, np.float32)
    weight[1] *= -1
    found = quantize(weight).dequantized()
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, weight, rtol=0.07, atol=1e-36)


@pytest.mark.parametrize("quantize", QUANTIZERS)
def test_quantize_refuses_invalid_input(quantize):
    with pytest.raises(ModelError, match=r"must be a matrix. Given: shape \[3\]"):
        quantize(np.zeros(3, np.float32))
    for bad in (np.nan, np.inf):
        with pytest.raises(ModelError, match="must hold finite numbers"):
            quantize(np.full((2, 64), bad, np.float32))


@pytest.mark.parametrize("group_size", [0, -1, 48, 128])
def test_quantize_w4_refuses_groups_that_do_not_fit(group_size):
    with pytest.raises(ModelError, match=f"group_size must divide the 64 columns of the matrix. Given: {group_size}"):
        quantize_w4(matrix(), group_size)


GOOD = {
    "qvalues": np.zeros((2, 8), np.uint8),
    "scales": np.ones((2, 2), np.float32),
    "zeros": np.zeros((2, 2), np.uint8),
    "bits": 4,
    "group_size": 4,
    "g_idx": np.array([0, 0, 0, 0, 1, 1, 1, 1], np.int32),
}


@pytest.mark.parametrize(
    "changes",
    [
        {"bits": 8},
        {"bits": 3},
        {"qvalues": np.zeros(8, np.uint8)},
        {"qvalues": np.zeros((2, 8), np.int8), "bits": 8},
        {"group_size": 0},
        {"group_size": 3},
        {"scales": np.ones((2, 2))},
        {"zeros": np.zeros((2, 1), np.uint8)},
        {"zeros": np.zeros((2, 2), np.int8)},
        {"g_idx": np.zeros(8)},
        {"g_idx": np.zeros(7, np.int32)},
    ],
)
def test_quantized_tensor_asserts_that_its_arrays_match(changes):
    QuantizedTensor(**GOOD)
    with pytest.raises(AssertionError):
        QuantizedTensor(**GOOD | changes)


@pytest.mark.parametrize("group", [2, -1])
def test_group_of_columns_refuses_unknown_groups(group):
    with pytest.raises(ModelError, match="g_idx must have groups from 0 to 1"):
        group_of_columns(np.full(8, group, np.int32), 4, 2)
