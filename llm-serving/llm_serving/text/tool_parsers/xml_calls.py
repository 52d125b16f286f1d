"""Tool calls with a tag for each argument, in the formats of Qwen3-Coder, Seed-OSS, MiniMax-M2 and DeepSeek-V3.2."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
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


def _read(layout: XmlLayout, schemas: base.Schemas, source: base.CallSource) -> base.Reading:
    argument, call_end = layout.argument[0], layout.call[2]
    in_call = source.opening == layout.call[0]
    while in_call or (yield from source.take(layout.call[0], layout.closing)) == layout.call[0]:
        in_call = False
        tool, _ = yield from _text_before(source, layout.call[1])
        arguments: dict[str, Any] = {}
        while (yield from source.take(argument, call_end)) == argument:
            key, name_end = yield from _text_before(source, *layout.name_ends)
            text = yield from _value(layout, source)
            arguments[key] = _typed(layout, text, name_end, schema_of(schemas, tool, key))
        yield base.Call(tool, arguments_of(arguments))
    if not source.end:
        raise base.NotACallError


def _text_before(source: base.CallSource, *delimiters: str) -> Generator[None, None, tuple[str, str]]:
    """Return a name and the delimiter after it. Raise NotACallError for an invalid name."""
    longest = MAX_NAME_CHARS + max(map(len, delimiters))
    while True:
        text = source.body[source.at : source.at + longest]
        start, delimiter = min(
            ((start, each) for each in delimiters if (start := text.find(each)) >= 0), default=(len(text), "")
        )
        name = text[:start]
        if "<" in name or (start == longest if not delimiter else not is_name(name)):
            raise base.NotACallError
        if delimiter:
            source.at += start + len(delimiter)
            return name, delimiter
        yield None


def _value(layout: XmlLayout, source: base.CallSource) -> Generator[None, None, str]:
    """Return a value up to its closing tag, after which another argument begins or the call ends. Closing tags
    elsewhere belong to the value.
    """
    closing = layout.argument[2]
    start = search = source.at
    while True:
        while (end := source.body.find(closing, search)) < 0:
            search = max(start, len(source.body) - len(closing) + 1)
            yield None
        source.at = behind = end + len(closing)
        try:
            yield from source.expect(layout.argument[0], layout.call[2])
        except base.NotACallError:
            search = end + 1
            continue
        source.at = behind
        return source.body[start:end].removeprefix(layout.margin).removesuffix(layout.margin)


def _typed(layout: XmlLayout, text: str, name_end: str, schema: Any) -> Any:
    """Return the value of an argument. If the model does not state the type of the value, the schema decides."""
    if name_end == layout.string_end:
        return text
    if layout.string_end:
        try:
            return parsed(text)
        except base.NotACallError:
            pass
    return typed_value(text, schema)


def create(layout: XmlLayout) -> Callable[[base.Schemas], base.ToolParser]:
    # Some models omit the opening of the section.
    return base.delimited([layout.opening, layout.call[0]], partial(_read, layout))


def rules(layout: XmlLayout, callees: Sequence[base.Callee], most: int | None, delimiters: base.Delimiters) -> str:
    most_inside = most if layout.several else 1
    inside = f"WS? {base.repeated('call', 'WS?', most_inside)} WS? {delimiters(layout.closing)}"
    most_outside = 1 if layout.several else most
    times = "*" if most_outside is None else f"{{0,{most_outside}}}"
    calls = base.any_call(callees, partial(_call_rules, layout, delimiters.whitespace))
    return (
        f"calls: {base.repeated('whole', 'WS?', most_outside)}\n"
        f"whole: {delimiters(layout.opening)} {inside}\n"
        f"free: (opened {inside} | bare rest (WS? {delimiters(layout.closing)})?){times} TEXT?\n"
        f"{delimiters.up_to('opened', layout.opening)}"
        f"{delimiters.up_to('bare', layout.call[0])}"
        f"rest: {' | '.join(f'rest{i}' for i in range(len(callees)))}\n"
        f"{calls}"
        f"{unquoted_rule(layout.margin + layout.argument[2])}"
        'NAME: /[^<>"\\n]{1,64}/\n'
    )


def _call_rules(layout: XmlLayout, whitespace: str, index: int, callee: base.Callee) -> str:
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
