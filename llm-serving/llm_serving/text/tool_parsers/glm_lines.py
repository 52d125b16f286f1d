"""Tool calls of the first GLM-4 models: the name of a tool, a line break, and the arguments as JSON."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

from llm_serving.text.structured_output.grammars import literal
from llm_serving.text.tool_parsers import base
from llm_serving.text.tool_parsers.json_text import JsonEnd, StreamedCall, arguments_of, parsed

OPENING: Final = "<|assistant|>"
"""Opening delimiter of the second and later calls. The first call has none."""


class _Reader:
    """Reads one call. Only a tool name at the start distinguishes a call from text."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._end = JsonEnd()
        self._written: StreamedCall | None = None

    def read(self, body: str, *, ended: bool) -> base.Read | None:
        line, found, _ = body.lstrip().partition("\n")
        name = line.strip()
        if not found:
            if not any(each.startswith(name) for each in self._names):
                raise base.NotACallError
            return None
        if name not in self._names:
            raise base.NotACallError
        start = body.index("\n", body.index(name)) + 1
        begin = start + len(body[start:]) - len(body[start:].lstrip())
        if body[begin : begin + 1] == "{":
            self._written = self._written or StreamedCall(name, begin)
            call = self._written.read(body, ended=ended)
            return base.Read([call], self._written.end, may_continue=not (ended or self._written.is_whole))
        end = self._end.find(body, start)
        return None if end is None else base.Read([base.Call(name, arguments_of(parsed(body[start:end])))], end)


def create(names: Collection[str]) -> base.ToolParser:
    return base.DelimitedCalls({OPENING: partial(_Reader, frozenset(names))}, begins_open=True)


def rules(callees: Sequence[base.Callee], most: int | None, delimiters: base.Delimiters) -> str:
    """Return the grammar rules (see `base`). They allow one call, because these models write one call in an answer."""
    del most, delimiters
    names = "|".join(base.escaped(each.name) for each in callees)
    calls = [f"call{i}: {literal(each.name + chr(10))} @args{i}\n" for i, each in enumerate(callees)]
    return (
        f"calls: {base.any_of(callees)}\n"
        "free: calls | OTHER?\n"
        f"OTHER: TEXT & ~/\\s*({names})\\s*\\n(?s:.*)/\n"
        f"{''.join(calls)}"
    )
