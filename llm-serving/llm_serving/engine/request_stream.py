"""One answer as its reader gets it, piece by piece."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from llm_serving.core.request_output import RequestOutput

TAKEN_AT_ONCE: Final = 16
"""Pieces that are there already, before others have their turn: a whole answer may be."""


class RequestStream:
    """The pieces of one answer, in order. Close it early to abort the request."""

    def __init__(self, request_id: str, abort: Callable[[str], None], predicted_s: float | None = None) -> None:
        self.request_id = request_id
        self.predicted_s = predicted_s
        """Seconds from the door to the first token, as predicted there; None: too little had been measured."""
        self._abort = abort
        self._pieces: deque[RequestOutput] = deque()
        self._reader: asyncio.Future[None] | None = None
        """Who waits for the next piece; there is one reader at most."""
        self.take: Callable[[RequestOutput], bool] | None = None
        """Asked first whether it takes a piece that the reader waits for, unless it is the last one. What it raises is
        raised to the reader."""
        self._on_waiting: Callable[[int], None] | None = None
        self._finished = False
        self._num_at_once = 0
        """Pieces that were taken without having been waited for."""

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._finished:
            raise StopAsyncIteration
        self._num_at_once += 1
        if self._num_at_once > TAKEN_AT_ONCE:
            self._num_at_once = 1
            await asyncio.sleep(0)
        while not self._pieces:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
            self._num_at_once = 0
        piece = self._pieces.popleft()
        if self._on_waiting is not None:
            self._on_waiting(-piece.num_bytes)
        self._finished = piece.finished
        return piece

    def tell_waiting(self, on_waiting: Callable[[int], None] | None) -> None:
        """From now on `on_waiting` is told how many bytes more, or less, of pieces wait for the reader."""
        self._on_waiting = on_waiting
        if on_waiting is not None and self._pieces:
            on_waiting(sum(piece.num_bytes for piece in self._pieces))

    async def aclose(self) -> None:
        if not self._finished:
            self._finished = True
            self._abort(self.request_id)

    def put(self, piece: RequestOutput) -> None:
        reader = self._reader
        if reader is None or reader.done():
            self._keep(piece)
            return
        if self.take is not None and piece.finish_reason is None:
            try:
                if self.take(piece):
                    return
            except Exception as error:  # noqa: BLE001  handed to the reader
                reader.set_exception(error)
                return
        self._keep(piece)
        reader.set_result(None)

    def _keep(self, piece: RequestOutput) -> None:
        self._pieces.append(piece)
        if self._on_waiting is not None:
            self._on_waiting(piece.num_bytes)
