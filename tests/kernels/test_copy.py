import numpy as np
import pytest
from llm_serving.kernels import library
from support.kernel_calls import FLOAT_TYPES, Typed, call, empty, integers, scalar, status_of


def gather(table: Typed, indices: Typed, axis: int) -> Typed:
    shape = table.array.shape
    axis_index = axis % len(shape)
    y = empty((*shape[:axis_index], *indices.array.shape, *shape[axis_index + 1 :]), table.dtype)
    call("Gather", table, indices, scalar(axis, "int64"), scalar(0, "int64"), y)
    return y


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "int32", "float64"])
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_gather_supports_any_axis_and_type(dtype: str, axis: int, index_dtype: str) -> None:
    table = Typed(np.random.default_rng(1).integers(0, 100, (4, 5, 6)).astype(dtype), dtype)
    indices = integers([[3, 0, 1], [2, 2, 3]], index_dtype)
    assert np.array_equal(gather(table, indices, axis).array, np.take(table.array, indices.array, axis))


def test_gather_of_many_rows_equals_numpy() -> None:
    table = Typed(np.random.default_rng(2).standard_normal((50, 700)), "float64")
    indices = integers(np.random.default_rng(3).integers(0, 50, 999))
    assert np.array_equal(gather(table, indices, 0).array, table.array[indices.array])


@pytest.mark.parametrize("index", [-1, 4])
def test_gather_refuses_indices_outside_the_table(index: int) -> None:
    table = Typed(np.zeros((4, 2), dtype="float32"), "float32")
    parameters = (integers([0, index]), scalar(0, "int64"), scalar(0, "int64"), empty((2, 2), "float32"))
    assert status_of("Gather", table, *parameters) != 0
    assert library.last_error() == f"Gather: index {index} is outside the 4 rows of the table"


@pytest.mark.parametrize(("axis", "sizes"), [(0, [1, 3]), (1, [2, 0, 3]), (-1, [1, 2, 3])])
def test_split_divides_an_axis(axis: int, sizes: list[int]) -> None:
    x = Typed(np.random.default_rng(4).standard_normal((4, 5, 6)), "float64")
    expected = np.split(x.array, np.cumsum(sizes)[:-1], axis)
    parts = [empty(part.shape, "float64") for part in expected]
    call("SplitWithSize", x, integers(sizes, "int64"), scalar(axis, "int64"), *parts)
    assert all(np.array_equal(part.array, want) for part, want in zip(parts, expected, strict=True))


def test_split_refuses_sizes_that_do_not_add_up() -> None:
    x = Typed(np.zeros((2, 5)), "float64")
    parts = [empty((2, 2), "float64"), empty((2, 2), "float64")]
    assert status_of("SplitWithSize", x, integers([2, 2], "int64"), scalar(-1, "int64"), *parts) != 0
    assert library.last_error() == "SplitWithSize: sizes add up to 4 of 5"


MASKS = ("begin", "end", "ellipsis", "new", "shrink")


def sliced(x: Typed, shape: tuple[int, ...], *ranges: object, **masks: int) -> Typed:
    """`ranges` are begin, end and strides; a mask has a bit for each entry."""
    y = empty(shape, x.dtype)
    given = [scalar(masks.get(name, 0), "int64") for name in MASKS]
    call("StridedSlice", x, *(integers(each, "int64") for each in ranges), *given, y)
    return y


@pytest.mark.parametrize("dtype", ["bool", "float16", "int32", "float64"])
def test_slices_equal_numpy(dtype: str) -> None:
    x = Typed(np.random.default_rng(5).integers(0, 100, (4, 5, 6)).astype(dtype), dtype)
    for begin, end, strides, expected in (
        ([0, 0, 0], [4, 5, 6], [1, 1, 1], x.array),
        ([1], [3], [1], x.array[1:3]),
        ([0, 1, 2], [4, 5, 6], [2, 3, 2], x.array[0:4:2, 1:5:3, 2:6:2]),
        ([-3, -2], [-1, 100], [1, 1], x.array[-3:-1, -2:100]),
        ([3, 4, 5], [0, -100, 1], [-2, -1, -3], x.array[3:0:-2, 4::-1, 5:1:-3]),
        ([2, 3], [2, 1], [1, 1], x.array[2:2, 3:1]),
        ([1, 4], [4, -100], [2**63 - 1, -(2**63)], x.array[1:2, 4:3:-1]),
        ([0, 0, 5], [4, 5, 2], [2**62, 2**63 - 1, -(2**63) + 1], x.array[:1, :1, 5:]),
    ):
        assert np.array_equal(sliced(x, expected.shape, begin, end, strides).array, expected)


def test_slice_masks_open_ends_and_change_axes() -> None:
    x = Typed(np.random.default_rng(6).integers(0, 100, (4, 5, 6)), "int64")
    for begin, end, strides, masks, expected in (
        ([9, 9, 1], [0, 0, 2], [1, -1, 1], {"begin": 3, "end": 3}, x.array[:, ::-1, 1:2]),
        ([0, 2], [0, 3], [1, 1], {"ellipsis": 1}, x.array[..., 2:3]),
        ([1, 0, 2], [2, 0, 3], [1, 1, 1], {"ellipsis": 2}, x.array[1:2, ..., 2:3]),
        ([0, 1, -1], [0, 2, 0], [1, 1, 1], {"new": 1, "shrink": 6}, x.array[None, 1, -1]),
    ):
        assert np.array_equal(sliced(x, expected.shape, begin, end, strides, **masks).array, expected)


@pytest.mark.parametrize(
    ("begin", "strides", "shrink", "reason"),
    [
        ([0, 0, 0], [1, 1, 1], 0, "3 ranges are given for 2 axes"),
        ([0, 0], [1, 0], 0, "strides must not be 0"),
        ([0, 7], [1, 1], 2, "index 7 is outside an axis of 5"),
        ([0, 1], [1, 1], 0, "the slice has 16 elements, not 20"),
    ],
)
def test_unsupported_slices_are_refused(begin: list[int], strides: list[int], shrink: int, reason: str) -> None:
    x, end = Typed(np.zeros((4, 5)), "float64"), integers([9] * len(begin), "int64")
    masks = (scalar(value, "int64") for value in (0, 0, 0, 0, shrink))
    parameters = integers(begin, "int64"), end, integers(strides, "int64"), *masks, empty((4, 5), "float64")
    assert status_of("StridedSlice", x, *parameters) != 0
    assert library.last_error() == f"StridedSlice: {reason}"


@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "int64", *FLOAT_TYPES, "float64"])
def test_reshape_keeps_the_elements(dtype: str) -> None:
    x = Typed(np.arange(24).astype("uint16" if dtype == "bfloat16" else dtype).reshape(4, 6), dtype)
    for shape in ((24,), (2, 3, 4), (6, 4)):
        y = empty(shape, dtype)
        call("Reshape", x, integers(shape, "int64"), y)
        assert np.array_equal(y.array, x.array.reshape(shape))
    assert status_of("Reshape", x, integers((5, 5), "int64"), empty((5, 5), dtype)) != 0
    assert library.last_error() == "Reshape: the result must be like the input"


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "int32", "float64"])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (0, -1, 1), (2, 1, 0)])
def test_transpose_reorders_axes(dtype: str, order: tuple[int, ...]) -> None:
    x = empty((4, 300, 6), dtype)
    x.array[...] = np.random.default_rng(8).integers(0, 100, x.array.shape).astype(x.array.dtype)
    expected = x.array.transpose(order)
    y = empty(expected.shape, dtype)
    call("Transpose", x, integers(order, "int64"), y)
    assert np.array_equal(y.array, expected)


@pytest.mark.parametrize("order", [(0, 0, 1), (0, 1, 3), (0, 1, -4)])
def test_transpose_refuses_an_order_without_each_axis(order: tuple[int, ...]) -> None:
    x = Typed(np.zeros((2, 3, 4)), "float64")
    assert status_of("Transpose", x, integers(order, "int64"), empty((2, 3, 4), "float64")) != 0
    assert library.last_error() == "Transpose: the order must have each axis once"


@pytest.mark.parametrize(("shape", "dtype"), [((4, 3), "float64"), ((4, 3, 2), "float32")])
def test_transpose_refuses_another_result(shape: tuple[int, ...], dtype: str) -> None:
    x = Typed(np.zeros((2, 3, 4)), "float64")
    assert status_of("Transpose", x, integers([2, 1, 0], "int64"), empty(shape, dtype)) != 0
    assert library.last_error() == "Transpose: y must have as many elements as x, of its type"
