"""Tool calls with a tag for each argument, in the formats of Qwen3-Coder, Seed-OSS, MiniMax-M2 and DeepSeek-V3.2."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from llm_serving.text.structured_output.grammars import literal
from llm_serving.text.tool_parsers import base
from llm_serving.text.tool_parsers.json_text import MAX_NAME_CHARS, arguments_of, is_name, parsed
from llm_serving.text.tool_parsers.xml_values import arguments_term, schema_of, typed_value, unquoted_rule


@dataclass(frozen=True, slots=True)
class XmlLayout:
    """The delimiters of a format.

    `call`: texts before the name of a tool, after the name, and after the arguments. `argument`: texts before the name
    of an argument, after the name, and after the value. `margin`: text on both sides of a value. `several`: whether
    several calls may follow one `opening`. `string_end`: text that replaces `argument[1]` if the value is a string, or
    "" if the format does not state types. In a format with a `string_end`, `argument[1]` states that the value is JSON.
    """

    opening: str
    closing: str
    call: tuple[str, str, str]
    argument: tuple[str, str, str]
    margin: str = ""
    several: bool = False
    string_end: str = ""

    @property
    def name_ends(self) -> tuple[str, ...]:
        return (self.argument[1], self.string_end) if self.string_end else (self.argument[1],)


_FUNCTION: Final = ("<function=", ">", "</function>")
_PARAMETER: Final = ("<parameter=", ">", "</parameter>")
QWEN: Final = XmlLayout("<tool_call>", "</tool_call>", _FUNCTION, _PARAMETER, margin="\n")
SEED: Final = XmlLayout("<seed:tool_call>", "</seed:tool_call>", _FUNCTION, _PARAMETER)
MINIMAX: Final = XmlLayout(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    ('<invoke name="', '">', "</invoke>"),
    ('<parameter name="', '">', "</parameter>"),
    several=True,
)
DSML: Final = XmlLayout(
    "<｜DSML｜function_calls>",
    "</｜DSML｜function_calls>",
    ('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"),
    ('<｜DSML｜parameter name="', '" string="false">', "</｜DSML｜parameter>"),
    several=True,
    string_end='" string="true">',
)

_SPACES: Final = re.compile(r"\s*")


class _Reader:
    """Reads the calls after one opening delimiter, which opens a section of calls or, if `in_call`, one call."""

    def __init__(self, layout: XmlLayout, schemas: Mapping[str, Mapping[str, Any]], *, in_call: bool) -> None:
        self._layout = layout
        self._schemas = schemas
        self._step = self._name if in_call else self._between
        self._at = self._search = 0
        """`_at`: index after the text that was read. `_search`: index from which to search for the end of a value."""
        self._calls: list[base.Call] = []
        self._calls_end = 0
        self._tool = self._key = self._name_end = ""
        self._arguments: dict[str, Any] = {}
        self._is_closed = False

    def read(self, body: str, *, ended: bool) -> base.Read | None:
        try:
            while not self._is_closed and self._step(body):
                pass
        except base.NotACallError:
            if not self._calls:
                raise
            self._is_closed = True
        if not self._calls:
            return None
        return base.Read(self._calls, self._calls_end, may_continue=not self._is_closed and not ended)

    def _between(self, body: str) -> bool:
        found = self._next(body, self._layout.call[0], self._layout.closing)
        if found == self._layout.closing:
            if not self._calls:
                raise base.NotACallError
            self._calls_end, self._is_closed = self._at, True
        elif found:
            self._step = self._name
        return bool(found)

    def _name(self, body: str) -> bool:
        found = self._text_before(body, self._layout.call[1])
        if found is None:
            return False
        self._tool, self._arguments, self._step = found[0], {}, self._inside
        return True

    def _inside(self, body: str) -> bool:
        found = self._next(body, self._layout.argument[0], self._layout.call[2])
        if found == self._layout.call[2]:
            self._calls.append(base.Call(self._tool, arguments_of(self._arguments)))
            self._calls_end, self._step = self._at, self._between
        elif found:
            self._step = self._argument
        return bool(found)

    def _argument(self, body: str) -> bool:
        found = self._text_before(body, *self._layout.name_ends)
        if found is None:
            return False
        self._key, self._name_end = found
        self._search, self._step = self._at, self._value
        return True

    def _value(self, body: str) -> bool:
        """Read a value up to its closing tag, after which another argument begins or the call ends. Closing tags
        elsewhere belong to the value. Return False if more text is needed.
        """
        closing = self._layout.argument[2]
        start = self._at
        while (end := body.find(closing, self._search)) >= 0:
            try:
                self._at = end + len(closing)
                if not self._next(body, self._layout.argument[0], self._layout.call[2], skip=False):
                    self._at, self._search = start, end
                    return False
            except base.NotACallError:
                self._search = end + 1
                continue
            margin = self._layout.margin
            text = body[start:end].removeprefix(margin).removesuffix(margin)
            self._arguments[self._key] = self._typed(text)
            self._step = self._inside
            return True
        self._at, self._search = start, max(start, len(body) - len(closing) + 1)
        return False

    def _typed(self, text: str) -> Any:
        """Return the value of an argument. If the model does not state the type of the value, the schema decides."""
        if self._name_end == self._layout.string_end:
            return text
        if self._layout.string_end:
            try:
                return parsed(text)
            except base.NotACallError:
                pass
        return typed_value(text, schema_of(self._schemas, self._tool, self._key))

    def _next(self, body: str, *delimiters: str, skip: bool = True) -> str:
        """Return the next delimiter, or "" if incomplete; move past it if `skip`. Raise NotACallError without one."""
        at = _end_of_spaces(body, self._at)
        if skip:
            self._at = at
        for delimiter in delimiters:
            if body.startswith(delimiter, at):
                self._at += len(delimiter) if skip else 0
                return delimiter
        if at - self._at > MAX_NAME_CHARS or not any(delimiter.startswith(body[at:]) for delimiter in delimiters):
            raise base.NotACallError
        return ""

    def _text_before(self, body: str, *delimiters: str) -> tuple[str, str] | None:
        """Return a name and the delimiter after it, or None if incomplete. Raise NotACallError for an invalid name."""
        longest = MAX_NAME_CHARS + max(map(len, delimiters))
        text = body[self._at : self._at + longest]
        start, delimiter = min(
            ((start, each) for each in delimiters if (start := text.find(each)) >= 0), default=(len(text), "")
        )
        name = text[:start]
        if "<" in name or (start == longest if not delimiter else not is_name(name)):
            raise base.NotACallError
        if not delimiter:
            return None
        self._at += start + len(delimiter)
        return name, delimiter


def _end_of_spaces(text: str, start: int) -> int:
    found = _SPACES.match(text, start)
    assert found is not None
    return found.end()


def create(layout: XmlLayout, schemas: Mapping[str, Mapping[str, Any]]) -> base.ToolParser:
    readers = {
        layout.opening: partial(_Reader, layout, schemas, in_call=False),
        layout.call[0]: partial(_Reader, layout, schemas, in_call=True),  # some models omit the opening of the section
    }
    return base.DelimitedCalls(readers)


def rules(layout: XmlLayout, callees: Sequence[base.Callee], most: int | None, delimiters: base.Delimiters) -> str:
    most_inside = most if layout.several else 1
    inside = f"WS? {base.repeated('call', 'WS?', most_inside)} WS? {delimiters(layout.closing)}"
    most_outside = 1 if layout.several else most
    times = "*" if most_outside is None else f"{{0,{most_outside}}}"
    calls = "".join(_call_rules(layout, i, each, delimiters.whitespace) for i, each in enumerate(callees))
    return (
        f"calls: {base.repeated('whole', 'WS?', most_outside)}\n"
        f"whole: {delimiters(layout.opening)} {inside}\n"
        f"free: (opened {inside} | bare rest (WS? {delimiters(layout.closing)})?){times} TEXT?\n"
        f"{delimiters.up_to('opened', layout.opening)}"
        f"{delimiters.up_to('bare', layout.call[0])}"
        f"rest: {' | '.join(f'rest{i}' for i in range(len(callees)))}\n"
        f"call: {base.any_of(callees)}\n{calls}"
        f"{unquoted_rule(layout.margin + layout.argument[2])}"
        'NAME: /[^<>"\\n]{1,64}/\n'
    )


def _call_rules(layout: XmlLayout, index: int, callee: base.Callee, whitespace: str) -> str:
    before, after, closing = layout.call
    key, key_end, value_end = layout.argument
    string_end = layout.string_end or key_end

    def opening(name: str, is_text: bool) -> str:
        return literal(key + name + (string_end if is_text else key_end) + layout.margin)

    arguments = arguments_term(callee, opening, layout.margin + value_end, whitespace)
    if arguments is None:
        ends = " | ".join(literal(each + layout.margin) for each in layout.name_ends)
        arguments = f"({literal(key)} NAME ({ends}) unquoted WS?)*"
    return (
        f"call{index}: {literal(before)} rest{index}\n"
        f"rest{index}: {literal(callee.name + after)} WS? {arguments} {literal(closing)}\n"
    )
