"""How far a client has read a stream, as the id of an event tells it.

An id is that of the stream, a colon, and the number of events that were told of each choice, joined by dots; behind a
plus sign the number of those that follow all choices, or `end`. Choices come in an order that depends on the load, but
each one's events do not, so this tells the rest whatever the order was.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from llm_serving.errors import RequestError

MAX_NUMBERED_CHOICES: Final = 16
"""Streams of more choices have no ids: each id has a number for each choice."""
END: Final = "end"
_COUNT: Final = r"(?:0|[1-9][0-9]{0,8})"
_POSITION: Final = re.compile(rf"({_COUNT}(?:\.{_COUNT}){{0,{MAX_NUMBERED_CHOICES - 1}}})(?:\+({_COUNT}|{END}))?")


class Position(NamedTuple):
    """What a client has been told; the beginning where there is nothing."""

    told: tuple[int, ...] = ()
    """Events of each choice."""
    closing: int = 0
    """Events behind those of all choices."""
    is_end: bool = False

    @classmethod
    def read(cls, field: str, text: str) -> Position:
        """Raises RequestError where the text is no position."""
        found = _POSITION.fullmatch(text)
        if found is None:
            raise RequestError(field, "must be the id of an event of this stream, or what follows its colon", text)
        counts, closing = found.groups()
        told = tuple(map(int, counts.split(".")))
        return cls(told, 0, True) if closing == END else cls(told, int(closing or 0))

    def check(self, num_choices: int) -> None:
        """Raises RequestError where it is that of a stream with another number of choices."""
        if self.told and len(self.told) != num_choices:
            raise RequestError("Last-Event-ID", f"must have the numbers of {num_choices} choices")


BEGINNING: Final = Position()
