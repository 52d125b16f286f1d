"""Tool calls of Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, repeated."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

from llm_serving.text.tool_parsers import base
from llm_serving.text.tool_parsers.json_text import JsonEnd, StreamedCall, call_of, parsed, streamed_call

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"


class _Reader:
    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._written: StreamedCall | None = None
        self._end = JsonEnd()
        self._object_end: int | None = None
        self._is_malformed = False

    def read(self, body: str, *, ended: bool) -> base.Read | None:
        self._written = self._written or streamed_call(body, 0, self._names)
        call = None if self._written is None else self._written.read(body, ended=ended)
        if self._object_end is None and not self._is_malformed:
            try:
                self._object_end = self._end.find(body)
            except base.NotACallError:
                if call is None:
                    raise
                self._is_malformed = True
        if self._is_malformed:  # the arguments are complete
            assert call is not None and self._written is not None
            return base.before_closing([call], body, self._written.end, CLOSING, ended=ended)
        if self._object_end is None:
            return None if call is None else self._partial(call, ended=ended)
        rest = body[self._object_end :]
        behind = rest.lstrip()
        if CLOSING.startswith(behind) and len(behind) < len(CLOSING) and not ended:
            return None if call is None else self._partial(call, ended=ended)
        calls = [call_of(parsed(body[: self._object_end])) if call is None else call]
        # Some models omit the closing.
        return base.Read(calls, len(body) - len(behind.removeprefix(CLOSING)))

    def _partial(self, call: base.Call, *, ended: bool) -> base.Read:
        assert self._written is not None
        return base.Read([call], self._written.end, may_continue=not ended)


def create(names: Collection[str]) -> base.ToolParser:
    return base.DelimitedCalls({OPENING: partial(_Reader, frozenset(names))})


def rules(callees: Sequence[base.Callee], most: int | None, delimiters: base.Delimiters) -> str:
    frame = base.each_framed(OPENING, f"WS? call WS? {delimiters(CLOSING)}", most, delimiters)
    return frame + base.json_calls(callees, "arguments", delimiters)
