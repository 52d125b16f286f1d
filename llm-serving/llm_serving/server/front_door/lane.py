"""The pieces of a stream that have nothing to wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from llm_serving.server.front_door.turns import Turns

LANE_KEY: Final = "llm_serving.lane"
"""Of a request's scope: the lane of its answer."""

T = TypeVar("T")


class Lane:
    """Writes a piece of an answer at once where its client takes them and the turn has time.

    A piece that is sent in the usual way wakes a task, which passes a dozen frames down to the socket; that costs more
    than the piece. Whatever has to wait, for the client or for its turn, goes that way.

    Args:
        cycle: The answer, until it is complete.
        turns: In which its pieces are sent.
    """

    def __init__(self, cycle: RequestResponseCycle, turns: Turns) -> None:
        self._cycle: RequestResponseCycle | None = cycle
        self._turns = turns

    def end(self) -> None:
        """Nothing is written any more. The answer refers to this."""
        self._cycle = None

    def pass_on(self, to_bytes: Callable[[int, T], bytes], index: int, piece: T) -> bool:
        """Writes what `to_bytes` makes of a piece in the middle of a body; False: nothing has been done.

        Raises:
            Exception: What `to_bytes` raises; nothing has been written.
        """
        cycle, turns = self._cycle, self._turns
        if (
            cycle is None
            or not cycle.chunked_encoding  # the head has not been sent, or says otherwise
            or cycle.flow.write_paused
            or cycle.disconnected
            or not turns.has_time
        ):
            return False
        began = turns.begin()
        try:
            body = to_bytes(index, piece)
            if body:
                cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        finally:
            turns.end(began)
        return True
