"""Operators of experts compared with NumPy, bit by bit where possible: routing, sorting, products and sums."""

import numpy as np
import pytest
from llm_serving.kernels import library
from support.instruction_sets import real_isas
from support.kernel_calls import (
    Array,
    Typed,
    call,
    empty,
    integers,
    linear,
    packed,
    quantized,
    scalar,
    status_of,
    typed,
    unpacked,
)
from support.kernels import reference

pytestmark = pytest.mark.skipif(not real_isas(), reason="needs a compiler")

EXPERTS, HIDDEN, INNER = 7, 70, 48
ROWS = (1, 5, 40)


def chosen_by(rng: np.random.Generator, rows: int, k: int) -> Array:
    """[rows, k], distinct experts in each row; the last expert is never chosen."""
    return np.argsort(rng.random((rows, EXPERTS - 1)), axis=1)[:, :k].astype(np.int32)


def whole(number: int) -> Typed:
    return scalar(number, "int64")


def sorted_rows(x: Typed, chosen: Array, list_type: int = 2) -> tuple[Typed, Typed, Typed]:
    count = chosen.size
    rows, places = empty((count, x.array.shape[1]), x.dtype), empty((count,), "int32")
    counts, before = empty((EXPERTS,), "int32"), empty((EXPERTS,), "int32")
    ways = whole(0), whole(0), whole(EXPERTS), whole(0), whole(list_type), scalar(True, "bool")
    call("MoeInitRoutingV2", x, integers(chosen), *ways, rows, places, counts, before)
    return rows, places, counts


def grouped(x: Typed, weight: Typed, groups: Typed, by_counts: int = 1) -> tuple[Typed | None, ...]:
    y = empty((x.array.shape[0], weight.array.shape[2]), "int32" if x.dtype == "int8" else x.dtype)
    ways = whole(3), whole(0), whole(by_counts), whole(0), None
    return x, weight, *(None,) * 6, groups, None, None, None, *ways, y


def test_router_selects_top_k_by_softmax(isa: str) -> None:
    for rows in ROWS:
        logits = np.random.default_rng(rows).integers(-3, 4, (rows, EXPERTS)).astype(np.float32)
        shares, chosen, places = (empty((rows, 3), dtype) for dtype in ("float32", "int32", "int32"))
        call("MoeGatingTopKSoftmax", typed(logits, "float32"), None, whole(3), shares, chosen, places)
        expected, numbers = reference.route(logits, 3, normalise=False)
        assert np.array_equal(chosen.array, numbers)
        assert np.allclose(shares.array, expected, rtol=1e-6, atol=0)
        assert np.array_equal(places.array, np.arange(3 * rows).reshape(3, rows).T)


def test_expert_rows_are_sorted_with_their_positions() -> None:
    for rows in ROWS:
        rng = np.random.default_rng(rows)
        x, chosen = typed(rng.standard_normal((rows, HIDDEN)), "bfloat16"), chosen_by(rng, rows, 3)
        order = np.argsort(chosen.reshape(-1), kind="stable")
        of_experts, places, counts = sorted_rows(x, chosen)
        assert np.array_equal(of_experts.array, x.array[order // 3])
        assert np.array_equal(places.array[order], np.arange(chosen.size))
        assert np.array_equal(counts.array, np.bincount(chosen.reshape(-1), minlength=EXPERTS))
        assert np.array_equal(sorted_rows(x, chosen, list_type=1)[2].array, np.cumsum(counts.array))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("is_packed", [True, False])
def test_expert_rows_equal_the_full_product_bit_for_bit(isa: str, dtype: str, is_packed: bool) -> None:
    rng = np.random.default_rng(8)
    rows = typed(rng.standard_normal((EXPERTS * INNER, HIDDEN)), dtype)
    counts = np.array([3, 0, 1, 9, 2, 0, 0])
    x = typed(rng.standard_normal((counts.sum(), HIDDEN)), dtype)
    of_rows = np.repeat(np.arange(EXPERTS), counts)
    weight = packed(rows) if is_packed else unpacked(rows)
    by_all = linear(x, weight).bits.reshape(-1, EXPERTS, INNER)
    shown = weight.array.reshape(EXPERTS, HIDDEN, INNER)
    if not is_packed:
        shown = np.ascontiguousarray(rows.array.reshape(EXPERTS, INNER, HIDDEN).transpose(0, 2, 1))
    for groups, by_counts in ((counts, 1), (np.cumsum(counts), 0)):
        given = Typed(shown, dtype) if is_packed else unpacked(Typed(shown, dtype))
        parameters = grouped(x, given, integers(groups, "int64"), by_counts)
        call("GroupedMatmulV4", *parameters)
        y = parameters[-1]
        assert y is not None
        assert np.array_equal(y.bits, by_all[np.arange(len(of_rows)), of_rows])


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("size", [HIDDEN, 2311])
def test_expert_sums_of_quantized_values_are_integers(isa: str, size: int, is_packed: bool) -> None:
    """The longer sums exceed the integers that float32 represents."""
    rng = np.random.default_rng(10)
    qvalues = rng.integers(100, 128, (EXPERTS, INNER, size)).astype(np.int8)
    counts = np.array([3, 0, 1, 9, 2, 0, 0])
    x = Typed(rng.integers(100, 128, (counts.sum(), size)).astype(np.int8), "int8")
    rows = qvalues.reshape(EXPERTS * INNER, size)
    if is_packed:
        shown = quantized(rows, rng.random(len(rows)), "bfloat16").array.reshape(EXPERTS, size, INNER)
    else:
        shown = unpacked(Typed(np.ascontiguousarray(qvalues.transpose(0, 2, 1)), "int8")).array
    parameters = grouped(x, Typed(shown, "int8"), integers(counts, "int64"))
    call("GroupedMatmulV4", *parameters)
    y = parameters[-1]
    assert y is not None
    of_rows = qvalues[np.repeat(np.arange(EXPERTS), counts)].astype(np.int32)
    expected = np.einsum("rk,rnk->rn", x.array.astype(np.int32), of_rows)
    assert np.array_equal(y.array, expected)
    assert size == HIDDEN or (expected.astype(np.float32).astype(np.int32) != expected).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_expert_results_are_summed_in_expert_order(isa: str, dtype: str) -> None:
    for rows in ROWS:
        rng = np.random.default_rng(rows)
        chosen, shares = chosen_by(rng, rows, 3), rng.random((rows, 3), np.float32)
        places = sorted_rows(typed(np.zeros((rows, 1)), dtype), chosen)[1]
        results, y = typed(rng.standard_normal((rows * 3, HIDDEN)), dtype), empty((rows, HIDDEN), dtype)
        given = results, places, typed(shares, "float32"), scalar(False, "bool"), None
        call("InnerMoeTokenUnpermute", *given, y)
        total = np.zeros((rows, HIDDEN), np.float32)
        values = results.values.astype(np.float32)
        for place, of_place in zip(*in_order(places.array.reshape(rows, 3), shares), strict=True):
            total += values[place] * of_place[:, None]
        assert np.array_equal(y.bits, typed(total, dtype).bits)


def in_order(places: Array, shares: Array) -> tuple[Array, Array]:
    """Indices [k, rows] and their weights, in order."""
    order = np.argsort(places, axis=1)
    return np.take_along_axis(places, order, 1).T, np.take_along_axis(shares, order, 1).T


def test_experts_refuse_unsupported_arguments() -> None:
    rng = np.random.default_rng(9)
    x = typed(rng.standard_normal((4, HIDDEN)), "bfloat16")
    weight = unpacked(typed(rng.standard_normal((EXPERTS, HIDDEN, INNER)), "bfloat16"))
    given = list(grouped(x, weight, integers([1, 1, 1, 1, 0, 0, 0], "int64")))
    cases = [
        (3, typed(np.ones((EXPERTS, INNER)), "bfloat16"), "parameter 3 must be None"),
        (8, integers([1, 1], "int64"), "group_list must tell of 7 experts"),
        (8, integers([1, 1, 1, 1, 1, 0, 0], "int64"), "group_list[4] = 1 does not fit 4 rows"),
        (8, integers([1, -1, 0, 0, 0, 0, 0], "int64"), "group_list[1] = -1 does not fit 4 rows"),
        (12, whole(0), "split_item must be 3, group_type and act_type 0"),
        (17, empty((4, INNER + 1), "bfloat16"), "shapes [4, 70] x [70, 48] do not fit"),
    ]
    for at, other, message in cases:
        assert status_of("GroupedMatmulV4", *given[:at], other, *given[at + 1 :]) == 1
        assert library.load().llm_last_error().decode() == f"GroupedMatmulV4: {message}"
    qvalues = Typed(np.ones((4, HIDDEN), np.int8), "int8")
    of_codes = list(grouped(qvalues, unpacked(Typed(np.ones((EXPERTS, HIDDEN, INNER), np.int8), "int8")), given[8]))
    cases = [
        (1, weight, "x and the weight must be of one type"),
        (3, typed(np.ones((EXPERTS, INNER)), "float32"), "parameter 3 must be None"),
        (17, empty((4, INNER), "float32"), "x must be of floats and y of its type, or x int8 and y int32"),
    ]
    for at, other, message in cases:
        assert status_of("GroupedMatmulV4", *of_codes[:at], other, *of_codes[at + 1 :]) == 1
        assert library.load().llm_last_error().decode() == f"GroupedMatmulV4: {message}"
    results = empty((4, HIDDEN), "bfloat16"), empty((4,), "int32"), empty((2,), "int32"), empty((2,), "int32")
    ways = whole(0), whole(0), whole(2), whole(0), whole(2), scalar(True, "bool")
    assert status_of("MoeInitRoutingV2", x, integers([[0], [1], [2], [0]]), *ways, *results) == 1
    assert library.load().llm_last_error().decode() == "MoeInitRoutingV2: experts[2] = 2 is outside the 2 experts"
    k = whole(EXPERTS + 1)
    gated = empty((4, 8), "float32"), empty((4, 8), "int32"), empty((4, 8), "int32")
    assert status_of("MoeGatingTopKSoftmax", typed(np.zeros((4, EXPERTS)), "float32"), None, k, *gated) == 1
    places, shares = integers([0, 1, 2, 4]), typed(np.ones((4, 1)), "float32")
    back = x, places, shares, scalar(False, "bool"), None, empty((4, HIDDEN), "bfloat16")
    assert status_of("InnerMoeTokenUnpermute", *back) == 1
