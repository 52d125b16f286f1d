import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from llm_serving.core.dtypes import from_bfloat16, round_to_bfloat16


def test_bfloat16_round_trips_through_float32() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    values = from_bfloat16(bits)
    back = round_to_bfloat16(values)
    assert np.array_equal(back[~np.isnan(values)], bits[~np.isnan(values)])
    assert np.all(np.isnan(from_bfloat16(back[np.isnan(values)])))


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**127), max_value=2.0**127))
def test_bfloat16_rounding_is_to_nearest(value: float) -> None:
    rounded = int(round_to_bfloat16(np.float32([value]))[0])
    neighbours = from_bfloat16(np.array([rounded - 1, rounded, rounded + 1]) & 0xFFFF).astype(np.float64)
    distances = np.where(np.isfinite(neighbours), np.abs(neighbours - value), np.inf)
    assert distances[1] == distances.min()
    if distances[1] == distances[2] and neighbours[1] != neighbours[2]:
        assert rounded % 2 == 0


def test_bfloat16_rounding_overflows_to_infinity_and_keeps_nan() -> None:
    with np.errstate(over="ignore"):
        values = from_bfloat16(round_to_bfloat16(np.float32([3.4e38, -3.4e38, np.nan, np.inf])))
    assert values[0] == np.inf and values[1] == -np.inf and np.isnan(values[2]) and values[3] == np.inf
