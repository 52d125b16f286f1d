"""Events of a stream with ids that say how far a client has read: enough to go on from there."""

from __future__ import annotations

from typing import Final

from llm_serving.core.request_output import RequestOutput
from llm_serving.server.generation.streaming import DONE, Chunks
from llm_serving.server.idempotency.request import END, Position

_BLANK: Final = b"\n\n"


class NumberedPieces:
    """Pieces of a stream with their ids, behind those that were told before."""

    def __init__(self, pieces: Chunks, stream_id: str, num_choices: int, position: Position) -> None:
        """`position` is that of a stream of so many choices."""
        assert len(position.told) in (0, num_choices)
        self._pieces = pieces
        self._prefix = f"id: {stream_id}:"
        self._told_before = list(position.told or (0,) * num_choices)
        self._closing_before = position.closing
        self._made = [0] * num_choices
        self._told = self._told_before.copy()
        self._alone = num_choices == 1

    def chunk(self, index: int, output: RequestOutput) -> bytes:
        events = self._pieces.chunk(index, output)
        if not events:
            return events
        numbered = []
        for event in events.split(_BLANK)[:-1]:
            self._made[index] += 1
            if self._made[index] > self._told_before[index]:
                self._told[index] = self._made[index]
                numbered.append(self._with_id(event, ""))
        return b"".join(numbered)

    async def finish(self) -> bytes:
        events = (await self._pieces.finish()).split(_BLANK)[:-1]
        numbered = []
        for number, event in enumerate(events, start=1):
            if number > self._closing_before:
                is_last = event + _BLANK == DONE
                numbered.append(self._with_id(event, f"+{END}" if is_last else f"+{number}"))
        return b"".join(numbered)

    def _with_id(self, event: bytes, closing: str) -> bytes:
        counts = str(self._told[0]) if self._alone else ".".join(map(str, self._told))
        return f"{self._prefix}{counts}{closing}\n".encode() + event + _BLANK
