import numpy as np
import pytest
from llm_serving.core.model_spec import RopeScaling
from llm_serving.layers.rotary import cos_sin_tables, inverse_frequencies
from model_factories import tiny_spec

pytestmark = pytest.mark.mindspore

LLAMA_3_1 = RopeScaling(
    kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)


def test_frequencies_without_scaling():
    frequencies = inverse_frequencies(tiny_spec(head_dim=8, rope_theta=10000.0))
    np.testing.assert_allclose(frequencies, [1, 0.1, 0.01, 0.001], rtol=1e-14)


def test_linear_scaling_divides_every_frequency():
    spec = tiny_spec(head_dim=8, rope_scaling=RopeScaling(kind="linear", factor=4.0))
    np.testing.assert_allclose(inverse_frequencies(spec), [0.25, 0.025, 0.0025, 0.00025], rtol=1e-14)


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        (0, 1.0),  # wavelength 6.3 positions: kept
        (16, 0.03760603093086393),  # 167: kept
        (28, 0.003211445994752591),  # 1956, just below 8192 / 4: kept
        (29, 0.002166570763503359),  # 2402: mixed, 80 % kept
        (31, 0.0008567514129196321),  # 3619: mixed, 42 % kept
        (35, 9.556212353964683e-05),  # 8219, just above 8192: an eighth
        (63, 3.068925988914511e-07),  # 2559196: an eighth
    ],
)
def test_scaling_of_llama_3_1(pair, expected):
    """theta 500,000, heads of 128; numbers by `bc` with 40 digits from the published case distinction."""
    spec = tiny_spec(head_dim=128, rope_theta=500000.0, rope_scaling=LLAMA_3_1)
    assert inverse_frequencies(spec)[pair] == pytest.approx(expected, rel=1e-13)


def test_tables_are_float64_values_rounded_once():
    cos, sin = cos_sin_tables(np.array([1.0, 0.001]), 5000)
    assert cos.shape == sin.shape == (5000, 4)
    assert cos.dtype == sin.dtype == np.float32
    assert cos[0].tolist() == [1, 1, 1, 1]
    assert sin[0].tolist() == [0, 0, 0, 0]
    assert cos[4999].tolist() == [np.float32(np.cos(4999.0)), np.float32(np.cos(4.999))] * 2
    assert sin[4999].tolist() == [np.float32(np.sin(4999.0)), np.float32(np.sin(4.999))] * 2
