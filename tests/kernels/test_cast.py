"""Cast for all types that MindSpore supports."""

import numpy as np
import pytest
from llm_serving.kernels import library
from support.kernel_calls import FLOAT_TYPES, Typed, call, empty, scalar, status_of, typed

PLAIN = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
SHAPES = ((1,), (0, 4), (3, 37), (5, 7000))


def cast(x: Typed, dtype: str) -> Typed:
    y = empty(x.array.shape, dtype)
    call("Cast", x, scalar(0, "int64"), y)
    return y


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_cast_widens_exactly_and_rounds_once(isa: str, dtype: str) -> None:
    for shape in SHAPES:
        values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        narrow = typed(values, dtype)
        assert np.array_equal(cast(Typed(values, "float32"), dtype).bits, narrow.bits), shape
        assert np.array_equal(cast(narrow, "float32").array, narrow.values), shape


def test_cast_between_float16_and_bfloat16_uses_float32() -> None:
    half = typed([1.0, -2.5, 0.1, 60000.0], "float16")
    assert np.array_equal(cast(half, "bfloat16").array, typed(half.values, "bfloat16").array)


@pytest.mark.parametrize("target", PLAIN)
def test_cast_supports_every_pair_of_types(target: str) -> None:
    for source in PLAIN:
        x = scalar(np.array([[0, 1, 5], [100, 1, 0]]).astype(source), source)
        assert np.array_equal(cast(x, target).array, x.array.astype(target)), source


def test_cast_to_bool_and_truncation_to_integers() -> None:
    x = typed([[0.0, -0.0, 0.25], [-1.75, 2.75, 1e-3]], "bfloat16")
    assert cast(x, "bool").array.tolist() == [[False, False, True], [True, True, True]]
    assert cast(x, "int32").array.tolist() == [[0, 0, 0], [-1, 2, 0]]
    assert cast(scalar([[True, False]], "bool"), "bfloat16").values.tolist() == [[1.0, 0.0]]


def test_cast_without_a_type_follows_the_output() -> None:
    y = empty((2,), "float32")
    call("Cast", scalar([3, -4], "int64"), y)
    assert y.array.tolist() == [3.0, -4.0]


def test_cast_refuses_unknown_types() -> None:
    x, y = scalar([1j], "complex64"), empty((1,), "float32")
    assert status_of("Cast", x, scalar(0, "int64"), y) != 0
    assert library.last_error() == "Cast: complex64 to float32 is no cast of numbers"
    assert status_of("Cast", typed([1.0, 2.0], "float32"), scalar(0, "int64"), y) != 0
    assert library.last_error() == "Cast: the result must have as many elements as the input"


def nearest(value: float, dtype: str) -> int:
    """Return the integer to which a float is cast."""
    ends = np.iinfo(dtype)
    if np.isnan(value):
        return 0
    return int(ends.max if value > ends.max else ends.min if value < ends.min else value)


@pytest.mark.parametrize("source", [*FLOAT_TYPES, "float64"])
@pytest.mark.parametrize("target", [name for name in PLAIN if "int" in name])
def test_cast_saturates_floats_beyond_the_integer_range(source: str, target: str) -> None:
    """At every position: the remainder of a vectorised loop uses other instructions."""
    powers = [2.0**exponent for exponent in (7, 8, 15, 16, 31, 32, 63, 64, 100)]
    values = [np.nan, np.inf, 0.5, 1.0, 1.5, 126.75, 3e38, *powers, *(power * (1 - 2**-8) for power in powers)]
    numbers = np.array([sign * value for value in values for sign in (1, -1)] * 3)
    x = Typed(numbers, source) if source == "float64" else typed(numbers, source)
    expected = [nearest(value, target) for value in x.values.tolist()]
    assert cast(x, target).array.tolist() == expected
    for value, one in zip(np.unique(x.array), np.unique(x.array), strict=True):
        single = Typed(np.array([value], x.array.dtype), source)
        assert cast(single, target).array.tolist() == [nearest(float(single.values[0]), target)], one
