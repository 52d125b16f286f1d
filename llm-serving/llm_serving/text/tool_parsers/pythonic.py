"""Tool calls as calls of Python functions with named arguments, as LFM2, MiniCPM 3 and OLMo 3 write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from llm_serving.text.structured_output.grammars import GrammarError, definitions_of, json_options, literal
from llm_serving.text.tool_parsers import base
from llm_serving.text.tool_parsers.json_text import arguments_of, is_name

_MAX_ENDS: Final = 16
"""Maximum number of closing texts inside string arguments. After each of them, all calls are parsed again."""
_CONSTANTS: Final[Mapping[str, bool | None]] = {
    "true": True,
    "True": True,
    "false": False,
    "False": False,
    "null": None,
    "None": None,
}
_TOOL: Final = re.compile(r"[\w.\-]+")
_NAME: Final = re.compile(r"[^\W\d]\w*")
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
_SPACES: Final = re.compile(r"\s*")
_STRINGS: Final = {
    quote: re.compile(rf"(?s){3 * quote}(.*?){3 * quote}|{quote}([^{quote}\\]*(?:\\.[^{quote}\\]*)*){quote}")
    for quote in "'\""
}
_ESCAPE: Final = re.compile(r"(?s)\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)")
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""} | {each: each for each in "\\'\"/"}


@dataclass(frozen=True, slots=True)
class PythonicLayout:
    """The texts before, after and between calls. `fence`: delimiters of a code block that may surround all calls."""

    opening: str
    closing: str
    between: str
    is_list: bool
    fence: tuple[str, str] = ("", "")


LFM2: Final = PythonicLayout("<|tool_call_start|>", "<|tool_call_end|>", ", ", is_list=True)
MINICPM: Final = PythonicLayout(
    "<|tool_call_start|>", "<|tool_call_end|>", "\n", is_list=False, fence=("\n```python\n", "\n```\n")
)
OLMO: Final = PythonicLayout("<function_calls>", "</function_calls>", "\n", is_list=False)


def read_calls(
    closing: str, parse: Callable[[str], PythonicSource], _: base.Schemas, source: base.CallSource
) -> base.Reading:
    """Read calls before `closing`."""
    num_ends = start = 0
    while (end := source.body.find(closing, start)) >= 0 or not source.ended:
        if end < 0:
            start = max(start, len(source.body) - len(closing) + 1)
            yield None
            continue
        start = end + 1
        num_ends += 1
        try:
            calls = parse(source.body[:end]).calls()
        except IncompleteError:  # the closing text may be part of a string
            if num_ends == _MAX_ENDS:
                raise
        else:
            source.at = end + len(closing)
            yield from calls
            return
    source.at = len(source.body)
    yield from parse(source.body).calls()


class IncompleteError(base.NotACallError):
    pass


class PythonicSource:
    """Parses calls, or a list of calls, which may be in a code block that starts and ends with the texts of `fence`."""

    def __init__(self, text: str, fence: tuple[str, str] = ("", "")) -> None:
        opening, closing = map(str.strip, fence)
        self._text = text.strip().removeprefix(opening).removesuffix(closing)
        self._at = 0

    def calls(self) -> list[base.Call]:
        """Return the calls. Raise IncompleteError if one is cut off, and NotACallError for any other text."""
        try:
            return self._calls()
        except (ValueError, RecursionError):  # a number with thousands of digits, or deep nesting
            raise base.NotACallError from None

    def _calls(self) -> list[base.Call]:
        calls: list[base.Call] = []
        ends = "]" if self._takes("[") else ""
        while not (self._takes(ends) if ends else self._peek(may_end=True) == ""):
            calls.append(self._call())
            self._takes(",")
        if not calls or self._peek(may_end=True):
            raise base.NotACallError
        return calls

    def _call(self) -> base.Call:
        name = self._match(_TOOL)[0]
        self._expect("(")
        arguments: dict[str, Any] = {}
        while not self._takes(")"):
            key = self._match(_NAME)[0]
            self._expect("=")
            arguments[key] = self._value()
            if self._peek() != ")":
                self._expect(",")
        if not is_name(name):
            raise base.NotACallError
        return base.Call(name, arguments_of(arguments))

    def _value(self) -> Any:
        char = self._peek()
        if char in "[(":
            return self._items("]" if char == "[" else ")")
        if char == "{":
            return self._object()
        if char in "'\"":
            return self._string(char)
        if char.isalpha():
            word = self._match(_NAME)[0]
            if word not in _CONSTANTS:
                raise base.NotACallError
            return _CONSTANTS[word]
        number = self._match(_NUMBER)
        return float(number[0]) if number[1] or number[2] else int(number[0])

    def _items(self, end: str) -> list[Any]:
        self._at += 1
        items: list[Any] = []
        while not self._takes(end):
            items.append(self._value())
            if self._peek() != end:
                self._expect(",")
        return items

    def _object(self) -> dict[str, Any]:
        self._at += 1
        members: dict[str, Any] = {}
        while not self._takes("}"):
            key = self._key()
            self._expect(":")
            members[key] = self._value()
            if self._peek() != "}":
                self._expect(",")
        return members

    def _key(self) -> str:
        key = self._value()
        if not isinstance(key, str):
            raise base.NotACallError
        return key

    def _string(self, quote: str) -> str:
        found = _STRINGS[quote].match(self._text, self._at)
        if found is None:
            raise IncompleteError
        self._at = found.end()
        return unescaped(found[1] if found[1] is not None else found[2])

    def _peek(self, *, may_end: bool = False) -> str:
        """Return the next character after white space. At the end, return "" if `may_end`, or raise IncompleteError."""
        found = _SPACES.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
        if self._at == len(self._text) and not may_end:
            raise IncompleteError
        return self._text[self._at : self._at + 1]

    def _takes(self, char: str) -> bool:
        found = self._peek(may_end=char in ",[") == char
        self._at += found
        return found

    def _expect(self, char: str) -> None:
        if not self._takes(char):
            raise base.NotACallError

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        self._peek()
        found = pattern.match(self._text, self._at)
        if found is None:
            raise base.NotACallError
        self._at = found.end()
        return found


def unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    units = _ESCAPE.sub(_unescaped, text)
    return units.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")  # joins pairs of \u escapes


def _unescaped(found: re.Match[str]) -> str:
    escape = found[1]
    return chr(int(escape[1:], 16)) if len(escape) > 1 else _ESCAPES.get(escape, found[0])


def written(layout: PythonicLayout, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    texts = (
        f"{name}({', '.join(f'{key}={json.dumps(each, ensure_ascii=False)}' for key, each in arguments.items())})"
        for name, arguments in calls
    )
    inside = layout.between.join(texts)
    before, after = layout.fence
    return f"{layout.opening}{before}{f'[{inside}]' if layout.is_list else inside}{after}{layout.closing}"


def create(layout: PythonicLayout) -> Callable[[base.Schemas], base.ToolParser]:
    parse = partial(PythonicSource, fence=layout.fence)
    return base.delimited([layout.opening], partial(read_calls, layout.closing, parse))


def rules(layout: PythonicLayout, callees: Sequence[base.Callee], most: int | None, delimiters: base.Delimiters) -> str:
    """Return the grammar rules of calls (see `base`): arguments in schema order, with values as JSON."""
    several = base.repeated("call", literal(layout.between), most)
    inside = f'"[" {several} "]"' if layout.is_list else f"WS? {several} WS?"
    if any(layout.fence):
        inside = f"{literal(layout.fence[0])} {several} {literal(layout.fence[1])}"
    calls = base.any_call(callees, partial(_call_rules, delimiters.whitespace))
    frame = base.framed([layout.opening], f"{inside} {delimiters(layout.closing)}", delimiters)
    return frame + calls


def _call_rules(whitespace: str, index: int, callee: base.Callee) -> str:
    definitions = definitions_of(callee.schema)

    def value(schema: Any) -> str:
        about = schema if isinstance(schema, dict) else {}
        return f"%json {json.dumps({**definitions, **about, **json_options(whitespace)})}"

    return call_rules(f"call{index}", callee, (f"{callee.name}(", "=", ", ", ")"), value)


def call_rules(rule: str, callee: base.Callee, texts: tuple[str, str, str, str], value: Callable[[Any], str]) -> str:
    """Return the grammar rules of a call with its arguments in schema order. Optional arguments may be missing.

    `rule`: name of the rule for the call. `texts`: texts before the arguments, between a name and its value, between
    two arguments, and after the arguments. `value(schema)` returns the grammar term for the values that match a schema.
    Raise GrammarError if the name of an argument is not a Python identifier.

    The rule `{rule}_first{k}` matches the arguments from index k on. The rule `{rule}_more{k}` matches a separator and
    these arguments, or no text if all are missing.
    """
    properties, required = callee.schema.get("properties"), callee.required
    opening, equals, between, closing = texts
    about = properties if isinstance(properties, dict) else {}
    if others := [name for name in about if not _NAME.fullmatch(name)]:
        broken = "is not a Python identifier, which calls of this model need; rename it"
        raise GrammarError(f"cannot be enforced: argument {others[0]!r} {broken}")
    rules = [f"{rule}: {literal(opening)} {rule}_first0 {literal(closing)}\n"]
    for k, (name, schema) in enumerate(about.items()):
        rules.append(f"{rule}_value{k}: {literal(name + equals)} {value(schema)}\n")
        for kind, before in (("first", ""), ("more", f"{literal(between)} ")):
            given = f"{before}{rule}_value{k} {rule}_more{k + 1}"
            left_out = "" if name in required else f" | {rule}_{kind}{k + 1}"
            rules.append(f"{rule}_{kind}{k}: {given}{left_out}\n")
    rules += [f'{rule}_{kind}{len(about)}: ""\n' for kind in ("first", "more")]
    return "".join(rules)
