"""Tool calls of Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>`, repeated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from llm_serving.text.structured_output.grammars import definitions_of
from llm_serving.text.tool_parsers import base
from llm_serving.text.tool_parsers.json_text import arguments_of, is_name
from llm_serving.text.tool_parsers.pythonic import IncompleteError, PythonicSource, call_rules, read_calls
from llm_serving.text.tool_parsers.xml_values import value_term

OPENING: Final = "<|tool_call>"
CLOSING: Final = "<tool_call|>"
QUOTE: Final = '<|"|>'
HEAD: Final = "call:"
_TOOL: Final = re.compile(r"[\w.\-]+")
_KEY: Final = re.compile(r"[^\s:{}\[\],<\"']+")


class _Source(PythonicSource):
    """Parses one call of Gemma 4, whose keys and strings have other delimiters than in JSON."""

    def _calls(self) -> list[base.Call]:
        if not self._skip(HEAD):
            raise base.NotACallError
        name = self._match(_TOOL)[0]
        if self._peek() != "{" or not is_name(name):
            raise base.NotACallError
        call = base.Call(name, arguments_of(self._object()))
        if self._peek(may_end=True):
            raise base.NotACallError
        return [call]

    def _skip(self, text: str) -> bool:
        self._peek()
        found = self._text.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def _value(self) -> Any:
        if not self._skip(QUOTE):
            return super()._value()
        end = self._text.find(QUOTE, self._at)
        if end < 0:
            raise IncompleteError
        start, self._at = self._at, end + len(QUOTE)
        return self._text[start:end]

    def _key(self) -> Any:
        return self._value() if self._peek() in "<\"'" else self._match(_KEY)[0]


create: Final = base.delimited([OPENING], partial(read_calls, CLOSING, _Source))


def rules(callees: Sequence[base.Callee], most: int | None, delimiters: base.Delimiters) -> str:
    """Return the grammar rules of calls (see `base`). Strings are constrained only by `enum` and `const`."""
    calls = base.any_call(callees, partial(_call_rules, delimiters))
    frame = base.each_framed(OPENING, f"call {delimiters(CLOSING)}", most, delimiters)
    return f"{frame}{delimiters.up_to('quoted', QUOTE)}{calls}"


def _call_rules(delimiters: base.Delimiters, index: int, callee: base.Callee) -> str:
    definitions = definitions_of(callee.schema)

    def value(schema: Any) -> str:
        term = value_term(schema, definitions, callee, delimiters.whitespace)
        if term is None:
            return f"{delimiters(QUOTE)} quoted"
        return term if term.startswith("%json") else f"{delimiters(QUOTE)} {term} {delimiters(QUOTE)}"

    return call_rules(f"call{index}", callee, (f"{HEAD}{callee.name}{{", ":", ",", "}"), value)
