"""Operations on residual streams, sparse activations and scaled rows in `program`, compared with NumPy."""

import numpy as np
import pytest
from llm_serving.models.altup import match_streams, mix_streams, sparsify
from llm_serving.network.builder import Network
from llm_serving.network.operations import Value, Weight
from support.kernel_calls import FLOAT_TYPES, assert_close, typed
from support.kernels import reference
from support.single_operations import random, result_of

STREAMS, SIZE = 3, 21


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize(("parts", "first", "offset"), [(3, 0, 0.0), (1, 0, 1.0), (2, 1, 0.5)])
def test_streams_are_mixed_with_coefficients(isa: str, dtype: str, parts: int, first: int, offset: float) -> None:
    widths = STREAMS * SIZE, parts * SIZE, STREAMS * parts
    x = random(40, sum(widths), dtype)

    def body(net: Network, whole: Value) -> Value:
        base, added, coefficients = net.split(whole, *widths)
        return mix_streams(net, base, added, coefficients, streams=STREAMS, offset=offset, first=first)

    y = result_of(x, widths[0], body)
    base, added, coefficients = np.split(x.values.astype(np.float64), np.cumsum(widths[:2]), axis=1)
    given = added.reshape(40, parts, SIZE), coefficients.reshape(40, STREAMS, parts) + offset
    assert_close(typed(y.array, dtype), reference.mix_streams(base, *given, first), 1e-5)


def test_streams_without_coefficients_get_the_offset_alone(isa: str) -> None:
    x = random(9, 4 * SIZE, "float32")

    def body(net: Network, whole: Value) -> Value:
        base, added = net.split(whole, STREAMS * SIZE, SIZE)
        return mix_streams(net, base, added, None, streams=STREAMS, offset=1.0, first=1)

    y = result_of(x, STREAMS * SIZE, body)
    expected = x.array[:, : STREAMS * SIZE].copy()
    expected[:, SIZE:] += np.tile(x.array[:, STREAMS * SIZE :], 2)
    assert np.array_equal(y.array, expected)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("sums", [False, True])
def test_streams_are_scaled_to_the_size_of_the_first(isa: str, dtype: str, sums: bool) -> None:
    values = np.random.default_rng(1).standard_normal((40, STREAMS * SIZE))
    values[:, SIZE : 2 * SIZE] *= 5
    values[3, 2 * SIZE :] = 0
    x = typed(values, dtype)

    def body(net: Network, whole: Value) -> Value:
        like, parts = net.split(whole, SIZE, (STREAMS - 1) * SIZE)
        return match_streams(net, like, parts, eps=1e-5, sums=sums)

    y = result_of(x, SIZE if sums else STREAMS * SIZE, body)
    expected = reference.match_streams(x.values[:, :SIZE], x.values[:, SIZE:], 1e-5, sums=sums)
    rounding = {"float32": 0.0, "float16": 2e-3, "bfloat16": 2e-2}[dtype] * sums  # the kernel rounds each partial sum
    assert_close(typed(y.array, dtype), expected, 1e-5 + rounding)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("scale", [1.6448536, -0.5, 0.0])
def test_only_the_largest_activations_remain(isa: str, dtype: str, scale: float) -> None:
    x = typed(np.random.default_rng(1).standard_normal((33, 100)) + 2, dtype)
    y = result_of(x, 100, lambda net, whole: sparsify(net, whole, scale))
    assert_close(typed(y.array, dtype), reference.sparsify(x.values, scale), 1e-5)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
@pytest.mark.parametrize("count", [1, 40])
def test_rows_are_scaled_by_a_vector(isa: str, dtype: str, count: int) -> None:
    x, gamma = random(count, 51, dtype), random(1, 50, dtype, seed=2)
    weight = Weight(("gamma",), (50,), ((50,),))
    y = result_of(x, 50, lambda net, whole: net.scaled(net.split(whole, 50, 1)[0], weight), {"gamma": gamma.values[0]})
    expected = x.values[:, :50].astype(np.float32) * gamma.values[0].astype(np.float32)
    assert np.array_equal(typed(y.array, dtype).bits, typed(expected, dtype).bits)
