"""Parser and grammar of calls that consist of a head with the tool's name, arguments as JSON, and closing texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from llm_serving.text.tool_parsers import base
from llm_serving.text.tool_parsers.json_text import MAX_HEAD_CHARS, JsonEnd, StreamedCall, arguments_of, is_name, parsed


@dataclass(frozen=True, slots=True)
class HeadedLayout:
    """The delimiters of a format.

    `section`: text before all calls. `opening`: text before each call. `head`: regular expression for the text between
    `opening` and the brace of the arguments, with a group `name` and perhaps a group `id`. `tail`: texts that may
    follow the arguments, in this order. The grammar rules allow only the last of them. `end`: text after all calls,
    which some models omit.
    """

    section: str
    opening: str
    head: re.Pattern[str]
    tail: tuple[str, ...]
    end: str


@dataclass(slots=True)
class HeadedReader:
    """Reads tool calls that begin with a header, such as the tool's name, before the JSON arguments. Calls of tools in
    `names` are returned while they are generated, others when they are complete.
    """

    layout: HeadedLayout
    names: Collection[str]
    _calls: list[base.Call] = field(default_factory=list)
    _at: int = 0
    _head: re.Match[str] | None = None
    _written: StreamedCall | None = None
    _json: JsonEnd = field(default_factory=JsonEnd)
    _is_closed: bool = False

    def read(self, body: str, *, ended: bool) -> base.Read | None:
        try:
            while self._step(body, ended):
                pass
        except base.NotACallError:
            if not self._calls:
                raise
            self._is_closed = True
        if self._is_closed:
            return base.Read(self._calls, self._at)
        begun = [] if self._written is None else [self._written.read(body, ended=ended)]
        calls = self._calls + begun
        end = self._at if self._written is None else self._written.end
        return base.Read(calls, end, may_continue=not ended) if calls else None

    def _step(self, body: str, ended: bool) -> bool:
        return self._read_head(body) if self._head is None else self._read_call(body, ended)

    def _read_head(self, body: str) -> bool:
        rest = body[self._at :].lstrip()
        if not rest.startswith(self.layout.opening):
            if self._calls and rest.startswith(self.layout.end):
                self._at = len(body) - len(rest) + len(self.layout.end)
                self._is_closed = True
            elif not any(delimiter.startswith(rest) for delimiter in (self.layout.opening, self.layout.end)):
                raise base.NotACallError
            return False
        start = len(body) - len(rest) + len(self.layout.opening)
        text = body[start : start + MAX_HEAD_CHARS + 1]
        self._head = self.layout.head.match(body, start, start + MAX_HEAD_CHARS)
        if self._head is None and ("{" in text or len(text) > MAX_HEAD_CHARS):
            raise base.NotACallError
        if self._head is None:
            return False
        name = self._head["name"]
        if not is_name(name):
            raise base.NotACallError
        if name in self.names:
            self._written = StreamedCall(name, self._head.end(), self._head.groupdict().get("id") or "")
        return True

    def _read_call(self, body: str, ended: bool) -> bool:
        assert self._head is not None
        start = self._head.end()
        if self._written is not None:
            call = self._written.read(body, ended=ended)
            end = self._written.end if self._written.is_whole else None
        elif (end := self._json.find(body, start)) is not None:
            call_id = self._head.groupdict().get("id") or ""
            call = base.Call(self._head["name"], arguments_of(parsed(body[start:end])), call_id)
        behind = None if end is None else self._behind_tail(body, end, ended)
        if behind is None:
            return False
        self._calls.append(call)
        self._at, self._head, self._written, self._json = behind, None, None, JsonEnd()
        return True

    def _behind_tail(self, body: str, at: int, ended: bool) -> int | None:
        for delimiter in self.layout.tail:
            rest = body[at:].lstrip()
            if rest.startswith(delimiter):
                at = len(body) - len(rest) + len(delimiter)
            elif delimiter.startswith(rest) and not ended:
                return None
        return at


def create(layout: HeadedLayout, names: Collection[str]) -> base.ToolParser:
    return base.DelimitedCalls({layout.section: partial(HeadedReader, layout, frozenset(names))})


def rules(
    layout: HeadedLayout,
    callees: Sequence[base.Callee],
    most: int | None,
    delimiters: base.Delimiters,
    head: Callable[[str], str],
    before_tail: str = "",
) -> str:
    """Return the grammar rules of up to `most` calls (see `base`). `head(name)`: term between `layout.opening` and the
    arguments. `before_tail`: term between the arguments and the last text in `layout.tail`, which ends the call.
    """
    opening, tail = delimiters(layout.opening), delimiters(layout.tail[-1])
    calls = "".join(
        f"call{i}: {opening} {head(each.name)} @args{i} {before_tail} {tail}\n" for i, each in enumerate(callees)
    )
    inside = f"{base.repeated('call', 'WS?', most)} {delimiters(layout.end)}"
    return f"{base.framed([layout.section], inside, delimiters)}call: {base.any_of(callees)}\n{calls}"
