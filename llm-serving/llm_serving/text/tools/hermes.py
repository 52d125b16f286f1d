"""Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one behind the other."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from llm_serving.text.tools.calls import MarkedCalls, Read, ToolParser
from llm_serving.text.tools.json_text import JsonEnd, call_of, parsed

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"


class _Reader:
    def __init__(self) -> None:
        self._end = JsonEnd()
        self._object_end: int | None = None

    def read(self, body: str, *, ended: bool) -> Read | None:
        if self._object_end is None:
            self._object_end = self._end.find(body)
        if self._object_end is None:
            return None
        rest = body[self._object_end :]
        behind = rest.lstrip()
        if CLOSING.startswith(behind) and len(behind) < len(CLOSING) and not ended:
            return None
        calls = [call_of(parsed(body[: self._object_end]))]
        # Some leave the closing out.
        return Read(calls, len(body) - len(behind.removeprefix(CLOSING)))


def create(names: Collection[str]) -> ToolParser:
    """A parser; calls are marked well enough without the names of the tools."""
    del names
    return MarkedCalls(OPENING, _Reader)
