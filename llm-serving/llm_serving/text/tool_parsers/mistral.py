"""Tool calls of Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` or `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

from llm_serving.text.structured_output.grammars import literal
from llm_serving.text.tool_parsers import base
from llm_serving.text.tool_parsers.json_text import (
    MAX_HEAD_CHARS,
    JsonEnd,
    StreamedCall,
    arguments_of,
    call_of,
    is_name,
    parsed,
)

OPENING: Final = "[TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"
_NAME: Final = re.compile(r"([\w.\-]+)(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?\s*(?=\{)")


class _Reader:
    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._written: StreamedCall | None = None
        self._end = JsonEnd()
        self._head: tuple[str | None, int] | None = None
        """(name before the arguments or None, index of the JSON). None until it is read."""

    def read(self, body: str, *, ended: bool) -> base.Read | None:
        if self._head is None:
            self._head = _head(body)
        if self._head is None:
            return None
        name, start = self._head
        if name is not None and name in self._names:
            self._written = self._written or StreamedCall(name, start)
            call = self._written.read(body, ended=ended)
            return base.Read([call], self._written.end, may_continue=not (ended or self._written.is_whole))
        end = self._end.find(body, start)
        if end is None:
            return None
        value = parsed(body[start:end])
        if name is not None:
            return base.Read([base.Call(name, arguments_of(value))], end)
        if not isinstance(value, list) or not value:
            raise base.NotACallError
        return base.Read([call_of(each) for each in value], end)


def _head(body: str) -> tuple[str | None, int] | None:
    stripped = body.lstrip()
    start = len(body) - len(stripped)
    if not stripped:
        return None
    if stripped[0] == "[":
        return None, start
    head = stripped[: MAX_HEAD_CHARS + 1]
    found = _NAME.match(head)
    if found is not None and is_name(found[1]):
        return found[1], start + found.end()
    if found is not None or "{" in head or not re.match(r"[\w.\-]", head) or len(head) > MAX_HEAD_CHARS:
        raise base.NotACallError
    return None


def create(names: Collection[str]) -> base.ToolParser:
    return base.DelimitedCalls({OPENING: partial(_Reader, frozenset(names))})


def rules(callees: Sequence[base.Callee], most: int | None, delimiters: base.Delimiters) -> str:
    if delimiters.are_special(ARGUMENTS):
        calls = [f"call{i}: {literal(each.name)} {delimiters(ARGUMENTS)} @args{i}\n" for i, each in enumerate(callees)]
        behind, call = (
            base.repeated("call", delimiters(OPENING), most),
            f"call: {base.any_of(callees)}\n" + "".join(calls),
        )
    else:
        several = base.repeated("call", 'WS? "," WS?', most)
        behind = f'WS? "[" WS? {several} WS? "]"'
        call = base.json_calls(callees, "arguments", delimiters)
    return f"{base.framed([OPENING], behind, delimiters)}{call}"
