"""Server-sent events of streamed responses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
STREAM_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Response headers with which proxies neither store nor buffer the response."""
BLANK: Final = b"\n\n"
"""End of an event."""
DONE: Final = b"data: [DONE]" + BLANK
_encode: Final = msgspec.json.Encoder().encode


def event(content: object) -> bytes:
    return b"data: " + _encode(content) + BLANK


def named_event(name: str, content: object) -> bytes:
    return b"event: " + name.encode() + b"\n" + event(content)


class TextEvents:
    """Encodes events whose JSON object, `content_of(text)`, differs only in the text. All the rest is encoded once."""

    __slots__ = ("_after", "_before")

    def __init__(self, content_of: Callable[[str], object]) -> None:
        empty, other = event(content_of("")), event(content_of("x"))  # equal up to the opening quotation mark
        begin = next(i for i, (ours, theirs) in enumerate(zip(empty, other, strict=False)) if ours != theirs) - 1
        self._before, self._after = empty[:begin], empty[begin + 2 :]

    def event(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after
