from pathlib import Path

import numpy as np
import pytest
from llm_serving.errors import ProtocolError
from llm_serving.transport.messages import ArrayLayout
from llm_serving.transport.shared_memory import SharedBuffers


@pytest.fixture
def buffers():
    shared = SharedBuffers.create(2, 1024)
    yield shared
    shared.close()


def test_the_other_mapping_sees_what_was_written(buffers) -> None:
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


def test_arrays_behind_others_leave_these_as_they_are(buffers) -> None:
    layout = buffers.write(0, [np.arange(17, dtype=np.int32), np.ones(1, np.float32)]).layout
    more = buffers.write(0, [np.full(3, 7, np.uint64)], behind=layout).layout
    first, second = buffers.read(0, layout)
    (third,) = buffers.read(0, more, behind=layout)
    assert (first.tolist(), second.tolist(), third.tolist()) == ([*range(17)], [1.0], [7, 7, 7])
    with pytest.raises(ProtocolError, match="exceed the buffer of 1024 bytes"):
        buffers.write(0, [np.zeros(210, np.int32)], behind=layout)


def test_empty_arrays_keep_their_shape(buffers) -> None:
    layout = buffers.write(0, [np.zeros((0, 7), np.int32)]).layout
    assert buffers.read(0, layout)[0].shape == (0, 7)


@pytest.mark.parametrize(
    ("buffer", "layout", "message"),
    [
        (2, [], "buffer 2 does not exist"),
        (-1, [], "buffer -1 does not exist"),
        (1, [ArrayLayout("<i4", (257,))], "exceed the buffer of 1024 bytes"),
        (0, [ArrayLayout("<i4", (2**40, 2**40))], "exceed|cannot"),
        (0, [ArrayLayout("<i4", (-4,))], "cannot be in a buffer"),
        (0, [ArrayLayout("|O", (1,))], "cannot be in a buffer"),
    ],
)
def test_a_layout_cannot_leave_its_buffer(buffers, buffer, layout, message) -> None:
    with pytest.raises(ProtocolError, match=message):
        buffers.read(buffer, layout)


def test_nothing_appears_in_dev_shm(buffers) -> None:
    buffers.write(0, [np.zeros(4, np.int32)])
    assert not list(Path("/dev/shm").glob("*llm_serving*"))
