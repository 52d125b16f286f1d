"""AddExt, Add, Mul, Greater, SiLU and Sigmoid for all inputs that MindSpore supports."""

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

SHAPES = [
    ((3, 37), (3, 37)),
    ((64, 1024), (64, 1024)),
    ((5, 40), (40,)),
    ((5, 40), (1, 40)),
    ((40,), (5, 40)),
    ((5, 40), ()),
    ((), (5, 40)),
    ((5, 40), (5, 1)),
    ((5, 1), (1, 40)),
    ((2, 1, 3, 1), (4, 1, 7)),
    ((1, 7), (1, 1)),
    ((1,), ()),
    ((0, 8), (1, 8)),
]
"""Shapes of both inputs."""
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def numbers(values: object, dtype: str) -> Typed:
    return scalar(np.array(values), dtype)


def result(operator: str, a: Typed, b: Typed, *more: Typed) -> Typed:
    y = empty(np.broadcast_shapes(a.array.shape, b.array.shape), a.dtype)
    call(operator, a, b, *more, y)
    return y


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_broadcast_rounds_floats_once(isa: str, dtype: str) -> None:
    for a_shape, b_shape in SHAPES:
        a, b = typed(normal(1, *a_shape), dtype), typed(normal(2, *b_shape), dtype)
        left, right = a.values.astype(np.float32), b.values.astype(np.float32)
        total, product = typed(left + right, dtype), typed(left * right, dtype)
        assert np.array_equal(result("Add", a, b).bits, total.bits), (a_shape, b_shape)
        assert np.array_equal(result("AddExt", a, b, scalar(1, "int64")).bits, total.bits), (a_shape, b_shape)
        assert np.array_equal(result("Mul", a, b).bits, product.bits), (a_shape, b_shape)


def test_broadcast_add_multiplies_by_alpha() -> None:
    a, b = typed(normal(1, 3, 40), "float32"), typed(normal(2, 40), "float32")
    y = result("AddExt", a, b, scalar(0.5, "float32"))
    assert np.array_equal(y.array, a.array + np.float32(0.5) * b.array)
    assert result("AddExt", integers([7, 9]), integers(4), scalar(-2, "int64")).array.tolist() == [-1, 1]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_broadcast_integers_wrap(dtype: str) -> None:
    a = integers(np.array([[1, 2, 3], [100, 101, 127]]), dtype)
    for b in (integers([[5], [3]], dtype), integers([7, 8, 9], dtype), integers(2, dtype), a):
        with np.errstate(over="ignore"):
            assert np.array_equal(result("Add", a, b).array, a.array + b.array)
            assert np.array_equal(result("AddExt", a, b, scalar(1, "int64")).array, a.array + b.array)
            assert np.array_equal(result("Mul", a, b).array, a.array * b.array)


@pytest.mark.parametrize("dtype", [*FLOAT_TYPES, *INTEGERS, "bool", "float64"])
def test_greater_equals_numpy_for_every_shape_and_type(dtype: str) -> None:
    for a_shape, b_shape in SHAPES:
        signed = [8 * normal(seed, *shape) for seed, shape in ((1, a_shape), (2, b_shape))]
        values = [np.abs(each) if dtype.startswith("uint") else each for each in signed]
        a, b = (typed(each, dtype) if dtype in FLOAT_TYPES else numbers(each.astype(dtype), dtype) for each in values)
        y = scalar(np.full(np.broadcast_shapes(a_shape, b_shape), fill_value=True), "bool")
        call("Greater", a, b, y)
        assert np.array_equal(y.array, np.greater(a.values, b.values)), (a_shape, b_shape)


def test_unknown_comparison_is_refused() -> None:
    a, y = typed([1.0], "float32"), empty((1,), "bool")
    for b, result_of, reason in (
        (integers([1]), y, "inputs must be of one type and the result bool, are float32, int32 and bool"),
        (a, a, "inputs must be of one type and the result bool, are float32, float32 and float32"),
        (typed([1.0, 2.0], "float32"), y, "shapes do not broadcast to the result's"),
    ):
        assert status_of("Greater", a, b, result_of) != 0
        assert library.last_error() == f"Greater: {reason}"
    assert status_of("Greater", scalar([1j], "complex64"), scalar([1j], "complex64"), y) != 0
    assert library.last_error() == "Greater: complex64 is no type of numbers that is compared here"


def test_broadcast_supports_float64_and_bool() -> None:
    a, b = numbers([0.1, 0.2], "float64"), numbers(0.3, "float64")
    assert np.array_equal(result("Add", a, b).array, a.array + b.array)
    assert np.array_equal(result("Mul", a, b).array, a.array * b.array)
    left, right = numbers([[False], [True]], "bool"), numbers([False, True], "bool")
    assert np.array_equal(result("Add", left, right).array, left.array | right.array)
    assert np.array_equal(result("Mul", left, right).array, left.array & right.array)


@pytest.mark.parametrize(
    ("a", "b", "reason"),
    [
        (typed(np.ones((2, 8)), "float32"), typed(np.ones(7), "float32"), "shapes do not broadcast to the result's"),
        (typed(np.ones(8), "float32"), typed(np.ones(8), "bfloat16"), "inputs and result must be of one type, are fl"),
        (numbers([1, 2], "complex64"), numbers(1, "complex64"), "complex64 is no type of numbers that is added or m"),
    ],
)
def test_broadcast_refuses_mismatched_arguments(a: Typed, b: Typed, reason: str) -> None:
    assert status_of("Mul", a, b, empty(a.array.shape, a.dtype)) != 0
    assert library.last_error().startswith(f"Mul: {reason}")


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_silu_equals_swiglu_with_a_second_half_of_ones(isa: str, dtype: str) -> None:
    for width in (1, 15, 16, 100, 40_000):
        x, y = typed(3 * normal(width, width), dtype), empty((width,), dtype)
        call("SiLU", x, y)
        expected = reference.swiglu(np.concatenate([x.values, np.ones(width)])[None])[0]
        assert_close(y, expected, 12 * FLOAT32_UNIT * np.abs(expected))


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_sigmoid_equals_sigmoid_gate(isa: str, dtype: str) -> None:
    for width in (1, 15, 16, 100, 40_000):
        x, y = typed(3 * normal(width, width), dtype), empty((width,), dtype)
        call("Sigmoid", x, y)
        expected = reference.sigmoid_gate(np.ones((width, 1)), x.values[:, None])[:, 0]
        assert_close(y, expected, 12 * FLOAT32_UNIT * np.abs(expected))


def test_sigmoid_of_large_values() -> None:
    x = numbers([-800.0, -1.5, 0.0, 3.0], "float64")
    y = numbers([0.0] * 4, "float64")
    call("Sigmoid", x, y)
    assert np.allclose(y.array, 1 / (1 + np.exp(-np.maximum(x.array, -700))), rtol=1e-14, atol=1e-300)
