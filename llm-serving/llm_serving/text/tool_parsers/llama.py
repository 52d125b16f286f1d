"""Tool calls of Llama 3 and 4: `{"name": ..., "parameters": {...}}`, several separated by `;`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

from llm_serving.text.tool_parsers import base
from llm_serving.text.tool_parsers.json_text import JsonEnd, StreamedCall, call_of, parsed, streamed_call

OPENING: Final = "<|python_tag|>"
_START, _END = "<|python_start|>", "<|python_end|>"


class _Reader:
    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._calls: list[base.Call] = []
        self._start = self._calls_end = 0
        self._end = JsonEnd()
        self._written: StreamedCall | None = None

    def read(self, body: str, *, ended: bool) -> base.Read | None:
        while True:
            if self._calls:  # another call or a text may follow
                rest = body[self._calls_end :].lstrip()
                if rest.startswith(_END):
                    self._calls_end = len(body) - len(rest) + len(_END)
                    continue
                behind = rest.removeprefix(";").lstrip()
                if _END.startswith(behind) and not ended:
                    return base.Read(self._calls, self._calls_end, may_continue=True)
                if not behind.startswith("{"):
                    return base.Read(self._calls, self._calls_end)
                self._start = len(body) - len(behind)
            elif not self._start:
                first = body.lstrip()
                if _END.startswith(first) and not ended:
                    return None
                self._start = len(body) - len(first.removeprefix(_END))
            self._written = written = self._written or streamed_call(body, self._start, self._names)
            begun = [] if written is None else [written.read(body, ended=ended)]
            calls_end = self._calls_end if written is None else written.end
            try:
                end = self._end.find(body, self._start)
                if end is None:
                    calls = self._calls + begun
                    return base.Read(calls, calls_end, may_continue=not ended) if calls else None
                call = begun[0] if begun else call_of(parsed(body[self._start : end]))
                if call.name not in self._names:
                    raise base.NotACallError
            except base.NotACallError:
                if self._calls or begun:
                    return base.Read(self._calls + begun, calls_end)
                raise
            self._calls.append(call)
            self._calls_end, self._end, self._written = end, JsonEnd(), None


def create(names: Collection[str]) -> base.ToolParser:
    reader = partial(_Reader, frozenset(names))
    return base.DelimitedCalls({OPENING: reader, _START: reader}, begins_open=True)


def rules(callees: Sequence[base.Callee], most: int | None, delimiters: base.Delimiters) -> str:
    """Return the grammar rules of calls (see `base`). Text that starts with a brace must be a call."""
    several = base.repeated("call", '";" WS?', most)
    return (
        f"calls: {several}\n"
        f"free: calls | OTHER? ({delimiters(OPENING)} calls)?\n"
        "OTHER: /[^{ \\n](?s:.*)/\n"
        f"{base.json_calls(callees, 'parameters', delimiters)}"
    )
