"""The stream of an answer's outputs to a client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from llm_serving.core.request_output import RequestOutput

MAX_READ_AT_ONCE: Final = 16
"""Maximum number of outputs that a reader gets in a row before the event loop runs other tasks."""


class RequestStream:
    """The outputs of one answer, in order, for at most one reader. If it is closed early, the request is aborted."""

    def __init__(self, request_id: str, abort: Callable[[str], None], predicted_s: float | None = None) -> None:
        self.request_id = request_id
        self.predicted_s = predicted_s
        """Seconds from arrival to the first token, predicted at admission; None: unknown."""
        self._abort = abort
        self._pieces: deque[RequestOutput] = deque()
        self._reader: asyncio.Future[None] | None = None
        self.take: Callable[[RequestOutput], bool] | None = None
        """Called with each output, except the final one, that arrives while the reader waits. Returns whether it used
        the output; if not, the reader gets it.
        """
        self._on_waiting: Callable[[int], None] | None = None
        self._finished = False
        self._num_at_once = 0

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        self._num_at_once += 1
        if self._num_at_once > MAX_READ_AT_ONCE:
            self._num_at_once = 1
            await asyncio.sleep(0)
        while not self._pieces:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
            self._num_at_once = 0
        piece = self._pieces.popleft()
        if self._on_waiting is not None:
            self._on_waiting(-piece.num_bytes)
        self._finished = piece.finish_reason is not None
        return piece

    def report_waiting(self, on_waiting: Callable[[int], None] | None) -> None:
        """Call `on_waiting` with the change in bytes whenever the unread outputs change; None: stop calling it."""
        self._on_waiting = on_waiting
        if on_waiting is not None and self._pieces:
            on_waiting(sum(piece.num_bytes for piece in self._pieces))

    async def aclose(self) -> None:
        if not self._finished:
            self._finished = True
            self._abort(self.request_id)

    def put(self, piece: RequestOutput) -> None:
        reader = self._reader if self._reader is not None and not self._reader.done() else None
        if reader is not None and self.take is not None and piece.finish_reason is None:
            try:
                if self.take(piece):
                    return
            except Exception as error:  # noqa: BLE001  raised to the reader
                reader.set_exception(error)
                return
        self._pieces.append(piece)
        if self._on_waiting is not None:
            self._on_waiting(piece.num_bytes)
        if reader is not None:
            reader.set_result(None)
