"""Arrays that travel in the frame."""

from __future__ import annotations

import numpy as np
import pytest
from llm_serving.errors import ProtocolError
from llm_serving.transport.messages import ArrayLayout
from llm_serving.transport.shared_memory import InlineArrays

ARRAYS = [np.arange(5, dtype=np.int32), np.ones((2, 3), np.float32), np.array([2**63], np.uint64)]


def test_what_is_written_is_read() -> None:
    arrays = InlineArrays(2)
    written = arrays.write(1, [*ARRAYS, np.zeros((0, 7), np.int32)])
    *read, empty = arrays.read(1, written.layout, written.content)
    for ours, theirs in zip(ARRAYS, read, strict=True):
        assert theirs.dtype == ours.dtype
        np.testing.assert_array_equal(theirs, ours)
        assert not theirs.flags.writeable
    assert empty.shape == (0, 7)


def test_other_types_are_not_sent() -> None:
    with pytest.raises(ProtocolError, match="an array of <f8 cannot be in a step"):
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
def test_a_layout_that_lies_is_refused(layout: tuple[ArrayLayout, ...]) -> None:
    with pytest.raises(ProtocolError):
        InlineArrays(2).read(0, layout, bytes(8))
