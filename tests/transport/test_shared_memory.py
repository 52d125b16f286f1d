from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from llm_serving.errors import ProtocolError
from llm_serving.transport.shared_memory import InlineArrays, SharedBuffers, num_bytes

INT, REAL, LONG = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.uint64)

ARRAYS = [np.array([2**63], np.uint64), np.arange(5, dtype=np.int32), np.ones((2, 3), np.float32)]
TYPES = [LONG, INT, REAL]


@pytest.fixture
def buffers():
    shared = SharedBuffers.create(2, 1024)
    yield shared
    shared.close()


def test_written_arrays_are_visible_in_the_other_mapping(buffers) -> None:
    shapes = buffers.write(1, ARRAYS).shapes
    other = SharedBuffers(buffers.fd, 2, buffers.buffer_bytes)
    for array, view in zip(ARRAYS, other.read(1, shapes, TYPES), strict=True):
        np.testing.assert_array_equal(array, view)
        assert view.dtype == array.dtype


def test_buffers_do_not_overlap(buffers) -> None:
    full = np.arange(256, dtype=np.int32)
    shapes = buffers.write(0, [full]).shapes
    buffers.write(1, [full + 1000])
    np.testing.assert_array_equal(buffers.read(0, shapes, [INT])[0], full)


def test_arrays_written_behind_others_do_not_change_them(buffers) -> None:
    types = [INT, REAL]
    shapes = buffers.write(0, [np.arange(17, dtype=np.int32), np.ones(1, np.float32)]).shapes
    before = num_bytes(shapes, types)
    more = buffers.write(0, [np.full(3, 7, np.uint64)], before).shapes
    first, second = buffers.read(0, shapes, types)
    (third,) = buffers.read(0, more, [LONG], behind=before)
    assert (first.tolist(), second.tolist(), third.tolist()) == ([*range(17)], [1.0], [7, 7, 7])
    assert third.flags.aligned
    with pytest.raises(ProtocolError, match="exceed the buffer of 1024 bytes"):
        buffers.write(0, [np.zeros(240, np.int32)], before)


def test_each_read_returns_what_was_written_last(buffers) -> None:
    one, two = np.arange(4, dtype=np.int32), np.full((2, 2), 9, np.int32)
    for number, array in enumerate((one, one + 1, two, one, one.astype(np.float32), two)):
        for buffer in (0, 1):
            shapes = buffers.write(buffer, [array + np.array(buffer + number, array.dtype)]).shapes
            (view,) = buffers.read(buffer, shapes, [array.dtype])
            np.testing.assert_array_equal(view, array + buffer + number)
            assert view.dtype == array.dtype


def test_a_list_that_was_read_can_be_changed(buffers) -> None:
    shapes = buffers.write(0, [np.arange(4, dtype=np.int32)]).shapes
    buffers.read(0, shapes, [INT]).clear()
    assert len(buffers.read(0, shapes, [INT])) == 1


def test_empty_arrays_keep_their_shape(buffers) -> None:
    shapes = buffers.write(0, [np.zeros((0, 7), np.int32)]).shapes
    assert buffers.read(0, shapes, [INT])[0].shape == (0, 7)


@pytest.mark.parametrize(
    ("buffer", "shapes", "message"),
    [
        (2, (), "buffer 2 does not exist"),
        (-1, (), "buffer -1 does not exist"),
        (0, ((257,),), "exceed the buffer of 1024 bytes"),
        (1, ((257,),), "bytes cannot contain"),
        (0, ((2**40, 2**40),), "exceed|cannot"),
        (0, ((-4,),), "bytes cannot contain"),
    ],
)
def test_shapes_beyond_their_buffer_are_rejected(buffers, buffer, shapes, message) -> None:
    with pytest.raises(ProtocolError, match=message):
        buffers.read(buffer, shapes, [INT] * len(shapes))


def test_shared_buffers_create_no_file_in_dev_shm(buffers) -> None:
    buffers.write(0, [np.zeros(4, np.int32)])
    assert not list(Path("/dev/shm").glob("*llm_serving*"))


def test_inline_arrays_round_trip() -> None:
    arrays = InlineArrays(2)
    written = arrays.write(1, [*ARRAYS, np.zeros((0, 7), np.int32)])
    *read, empty = arrays.read(1, written.shapes, [*TYPES, INT], written.content)
    for ours, theirs in zip(ARRAYS, read, strict=True):
        assert theirs.dtype == ours.dtype
        np.testing.assert_array_equal(theirs, ours)
        assert not theirs.flags.writeable
    assert empty.shape == (0, 7)


@pytest.mark.parametrize(
    "shapes",
    [((3,),), ((1,),), ((-2,),), ((2**62, 2**62),), ((2,), (1,))],
    ids=["too long", "too short", "below 0", "beyond numbers", "one too many"],
)
@pytest.mark.parametrize("num_types", [1, 2])
def test_inline_arrays_reject_shapes_that_do_not_match(shapes: tuple[tuple[int, ...], ...], num_types: int) -> None:
    with pytest.raises(ProtocolError):
        InlineArrays(2).read(0, shapes, [INT] * num_types, bytes(8))
