"""NumPy arrays inside a frame, for a WorkAgent that shares no memory with the master."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llm_serving.errors import ProtocolError
from llm_serving.transport.messages import ArrayLayout
from llm_serving.transport.shared_arrays import DTYPES, AnyArray, Written, layout_of


class InlineArrays:
    """Has the face of `SharedBuffers`: what that writes to memory travels in the frame, one array behind the other.

    Args:
        num_buffers: Steps that may be in flight.
    """

    def __init__(self, num_buffers: int) -> None:
        self.num_buffers = num_buffers

    def write(self, buffer: int, arrays: Sequence[AnyArray], behind: Sequence[ArrayLayout] = ()) -> Written:
        return Written(layout_of(arrays), b"".join([array.tobytes() for array in arrays]))

    def read(
        self, buffer: int, layout: Sequence[ArrayLayout], content: bytes, behind: Sequence[ArrayLayout] = ()
    ) -> list[AnyArray]:
        """Read-only views of the content.

        Raises:
            ProtocolError: The layout names another dtype or does not fit the content.
        """
        views: list[AnyArray] = []
        offset = 0
        for array in layout:
            try:
                view: AnyArray = np.ndarray(array.shape, DTYPES[array.dtype], content, offset)
            except (KeyError, TypeError, ValueError):  # a length below 0, or more than there is
                raise ProtocolError(f"an array of {array.dtype} {array.shape} is not in the frame") from None
            offset += view.nbytes
            views.append(view)
        if offset != len(content):
            raise ProtocolError(f"the arrays of a step take {offset} bytes; {len(content)} arrived")
        return views

    def close(self) -> None:
        """There is nothing to give back."""
