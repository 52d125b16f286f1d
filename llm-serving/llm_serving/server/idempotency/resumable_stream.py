"""Events of a stream with ids that say how far a client has read, so that it can resume after the last one."""

from __future__ import annotations

from typing import Final

from llm_serving.core.request_output import RequestOutput
from llm_serving.server.generation.streaming import DONE, Chunks
from llm_serving.server.idempotency.request import END, Position

_BLANK: Final = b"\n\n"


class NumberedPieces:
    """Adds an id to each event of `pieces`, and omits the events that the client has read."""

    def __init__(self, pieces: Chunks, stream_id: str, num_choices: int, position: Position) -> None:
        assert len(position.num_read) in (0, num_choices)
        self._pieces = pieces
        self._prefix = f"id: {stream_id}:"
        self._num_read = list(position.num_read or (0,) * num_choices)
        self._num_closing_read = position.num_closing
        self._num_made = [0] * num_choices
        self._num_sent = self._num_read.copy()

    def chunk(self, index: int, output: RequestOutput) -> bytes:
        events = self._pieces.chunk(index, output)
        if not events:
            return events
        numbered = []
        for event in events.split(_BLANK)[:-1]:
            self._num_made[index] += 1
            if self._num_made[index] > self._num_read[index]:
                self._num_sent[index] = self._num_made[index]
                numbered.append(self._with_id(event, ""))
        return b"".join(numbered)

    async def finish(self) -> bytes:
        events = (await self._pieces.finish()).split(_BLANK)[:-1]
        numbered = []
        for number, event in enumerate(events, start=1):
            if number > self._num_closing_read:
                is_last = event + _BLANK == DONE
                numbered.append(self._with_id(event, f"+{END}" if is_last else f"+{number}"))
        return b"".join(numbered)

    def _with_id(self, event: bytes, closing: str) -> bytes:
        counts = ".".join(map(str, self._num_sent))
        return f"{self._prefix}{counts}{closing}\n".encode() + event + _BLANK
