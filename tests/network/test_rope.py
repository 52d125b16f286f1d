import numpy as np
import pytest
from llm_serving.network.rope import Rotary, Scaling

LLAMA_3_1 = Scaling(kind="llama3", factor=8.0, low=1.0, high=4.0, original=8192)


def test_rope_frequencies_without_scaling_are_powers_of_theta():
    np.testing.assert_allclose(Rotary(8, 8, 10000.0).frequencies(1), [1, 0.1, 0.01, 0.001], rtol=1e-14)


def test_rope_linear_scaling_divides_every_frequency():
    rotary = Rotary(8, 8, 10000.0, scaling=Scaling(kind="linear", factor=4.0))
    np.testing.assert_allclose(rotary.frequencies(1), [0.25, 0.025, 0.0025, 0.00025], rtol=1e-14)


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
def test_rope_llama3_scaling_equals_the_reference(pair, expected):
    """theta 500,000, heads of 128; numbers computed by `bc` with 40 digits from the published case distinction."""
    frequencies = Rotary(128, 128, 500000.0, scaling=LLAMA_3_1).frequencies(1)
    assert frequencies[pair] == pytest.approx(expected, rel=1e-13)


def test_rope_tables_are_float64_values_rounded_once():
    rotary = Rotary(4, 4, 1e6)
    cos, sin = rotary.cos(5000), rotary.sin(5000)
    assert cos.shape == sin.shape == (5000, 4)
    assert cos.dtype == sin.dtype == np.float32
    assert cos[0].tolist() == [1, 1, 1, 1]
    assert sin[0].tolist() == [0, 0, 0, 0]
    assert cos[4999].tolist() == [np.float32(np.cos(4999.0)), np.float32(np.cos(4.999))] * 2
    assert sin[4999].tolist() == [np.float32(np.sin(4999.0)), np.float32(np.sin(4.999))] * 2


def test_rope_elements_outside_rotary_dim_have_cosine_1_and_sine_0():
    rotary = Rotary(16, 6, 100.0, interleaved=True, own=12)
    assert rotary.order() == [0, 2, 4, 6, 7, 8, 9, 10, 1, 3, 5, 11, -1, -1, -1, -1]
    still = [at for at, element in enumerate(rotary.order()) if element >= 6 or element < 0]
    assert np.all(rotary.cos(9)[:, still] == 1)
    assert np.all(rotary.sin(9)[:, still] == 0)
    assert np.all(rotary.sin(9)[1:, :3] != 0)


def test_rope_mean_rotated_keeps_pairs_that_hardly_rotate():
    """Pairs of one radian, of 1e-3 and of 1e-6 radians per position, and one that does not rotate; two heads."""
    rotary = Rotary(8, 6, 1e9)
    vector = np.arange(1, 17, dtype=np.float32)
    cos, sin = rotary.cos(4096).astype(np.float64), rotary.sin(4096).astype(np.float64)
    heads = vector.reshape(2, 8)
    turned = np.concatenate([-heads[:, 4:], heads[:, :4]], axis=1)
    each = heads[:, None] * cos + turned[:, None] * sin
    mean = rotary.mean_rotated(vector)
    np.testing.assert_allclose(mean, each.mean(axis=1).reshape(-1), rtol=1e-4, atol=1e-5)
    assert np.abs(mean.reshape(2, 8)[:, [0, 4]]).max() < 0.05
    np.testing.assert_allclose(mean.reshape(2, 8)[:, [2, 3, 6, 7]], heads[:, [2, 3, 6, 7]], atol=0.1)


@pytest.mark.parametrize(("served", "expected"), [(64, [1, 0.1]), (65, [0.5, 0.025])])
def test_rope_longrope_selects_divisors_by_the_served_context(served, expected):
    scaling = Scaling(kind="longrope", factor=4.0, original=64, short=(1.0, 1.0), long=(2.0, 4.0))
    np.testing.assert_allclose(Rotary(4, 4, 100.0, scaling=scaling).frequencies(served), expected, rtol=1e-14)


def test_rope_dynamic_scaling_starts_after_the_trained_context():
    rotary = Rotary(4, 4, 100.0, scaling=Scaling(kind="dynamic", factor=2.0, original=64))
    np.testing.assert_allclose(rotary.frequencies(64), [1, 0.1], rtol=1e-14)
    # base 100 * (2 * 128 / 64 - 1) ** (4 / 2) = 900, whose root is 30
    np.testing.assert_allclose(rotary.frequencies(128), [1, 1 / 30], rtol=1e-14)
