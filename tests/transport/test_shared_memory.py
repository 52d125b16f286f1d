from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from llm_serving.errors import ProtocolError
from llm_serving.transport.messages import ArrayLayout
from llm_serving.transport.shared_memory import InlineArrays, SharedBuffers


@pytest.fixture
def buffers():
    shared = SharedBuffers.create(2, 1024)
    yield shared
    shared.close()


def test_written_arrays_are_visible_in_the_other_mapping(buffers) -> None:
    arrays = [np.arange(5, dtype=np.int32), np.ones((2, 3), np.float32), np.array([2**63], np.uint64)]
    layout = buffers.write(1, arrays).layout
    other = SharedBuffers(buffers.fd, 2, buffers.buffer_bytes)
    for array, view in zip(arrays, other.read(1, layout), strict=True):
        np.testing.assert_array_equal(array, view)
        assert view.dtype == array.dtype


def test_buffers_do_not_overlap(buffers) -> None:
    full = np.arange(256, dtype=np.int32)
    layout = buffers.write(0, [full]).layout
    buffers.write(1, [full + 1000])
    np.testing.assert_array_equal(buffers.read(0, layout)[0], full)


def test_arrays_start_at_multiples_of_64_bytes(buffers) -> None:
    layout = buffers.write(0, [np.zeros(1, np.int32), np.zeros(1, np.int32)]).layout
    first, second = buffers.read(0, layout)
    assert second.ctypes.data - first.ctypes.data == 64


def test_arrays_written_behind_others_do_not_change_them(buffers) -> None:
    layout = buffers.write(0, [np.arange(17, dtype=np.int32), np.ones(1, np.float32)]).layout
    more = buffers.write(0, [np.full(3, 7, np.uint64)], behind=layout).layout
    first, second = buffers.read(0, layout)
    (third,) = buffers.read(0, more, behind=layout)
    assert (first.tolist(), second.tolist(), third.tolist()) == ([*range(17)], [1.0], [7, 7, 7])
    with pytest.raises(ProtocolError, match="exceed the buffer of 1024 bytes"):
        buffers.write(0, [np.zeros(210, np.int32)], behind=layout)


def test_each_read_returns_what_was_written_last(buffers) -> None:
    one, two = np.arange(4, dtype=np.int32), np.full((2, 2), 9, np.int32)
    for number, array in enumerate((one, one + 1, two, one, one.astype(np.float32), two)):
        for buffer in (0, 1):
            layout = buffers.write(buffer, [array + np.array(buffer + number, array.dtype)]).layout
            (view,) = buffers.read(buffer, layout)
            np.testing.assert_array_equal(view, array + buffer + number)
            assert view.dtype == array.dtype


def test_a_list_that_was_read_can_be_changed(buffers) -> None:
    layout = buffers.write(0, [np.arange(4, dtype=np.int32)]).layout
    buffers.read(0, layout).clear()
    assert len(buffers.read(0, layout)) == 1


def test_empty_arrays_keep_their_shape(buffers) -> None:
    layout = buffers.write(0, [np.zeros((0, 7), np.int32)]).layout
    assert buffers.read(0, layout)[0].shape == (0, 7)


@pytest.mark.parametrize(
    ("buffer", "layout", "message"),
    [
        (2, [], "buffer 2 does not exist"),
        (-1, [], "buffer -1 does not exist"),
        (0, [ArrayLayout("<i4", (257,))], "exceed the buffer of 1024 bytes"),
        (1, [ArrayLayout("<i4", (257,))], "bytes cannot contain"),
        (0, [ArrayLayout("<i4", (2**40, 2**40))], "exceed|cannot"),
        (0, [ArrayLayout("<i4", (-4,))], "bytes cannot contain"),
        (0, [ArrayLayout("|O", (1,))], "bytes cannot contain"),
    ],
)
def test_layout_beyond_its_buffer_is_rejected(buffers, buffer, layout, message) -> None:
    with pytest.raises(ProtocolError, match=message):
        buffers.read(buffer, layout)


def test_shared_buffers_create_no_file_in_dev_shm(buffers) -> None:
    buffers.write(0, [np.zeros(4, np.int32)])
    assert not list(Path("/dev/shm").glob("*llm_serving*"))


ARRAYS = [np.arange(5, dtype=np.int32), np.ones((2, 3), np.float32), np.array([2**63], np.uint64)]


def test_inline_arrays_round_trip() -> None:
    arrays = InlineArrays(2)
    written = arrays.write(1, [*ARRAYS, np.zeros((0, 7), np.int32)])
    *read, empty = arrays.read(1, written.layout, written.content)
    for ours, theirs in zip(ARRAYS, read, strict=True):
        assert theirs.dtype == ours.dtype
        np.testing.assert_array_equal(theirs, ours)
        assert not theirs.flags.writeable
    assert empty.shape == (0, 7)


def test_inline_arrays_reject_other_dtypes() -> None:
    with pytest.raises(ProtocolError, match="cannot contain an array of <f8"):
        InlineArrays(2).write(0, [np.zeros(3)])


@pytest.mark.parametrize(
    "layout",
    [
        (ArrayLayout("<i4", (3,)),),
        (ArrayLayout("<i4", (1,)),),
        (ArrayLayout("<i4", (-2,)),),
        (ArrayLayout("<i4", (2**62, 2**62)),),
        (ArrayLayout("|O", (1,)),),
        (ArrayLayout("<i4", (2,)), ArrayLayout("<i4", (1,))),
    ],
    ids=["too long", "too short", "below 0", "beyond numbers", "objects", "one too many"],
)
def test_inline_arrays_reject_a_layout_that_does_not_match(layout: tuple[ArrayLayout, ...]) -> None:
    with pytest.raises(ProtocolError):
        InlineArrays(2).read(0, layout, bytes(8))
