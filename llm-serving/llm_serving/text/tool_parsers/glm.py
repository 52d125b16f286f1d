"""Tool calls of GLM-4.5 and later: `<tool_call>name`, `<arg_key>k</arg_key><arg_value>v</arg_value>`, ..."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from llm_serving.text.structured_output.grammars import literal
from llm_serving.text.tool_parsers import base
from llm_serving.text.tool_parsers.json_text import arguments_of, is_name
from llm_serving.text.tool_parsers.xml_values import arguments_term, schema_of, typed_value, unquoted_rule

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"
_VALUE: Final = "<arg_value>"
_VALUE_END: Final = "</arg_value>"
_ARGUMENT: Final = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _read(schemas: base.Schemas, source: base.CallSource) -> base.Reading:
    while True:
        value, closing = source.body.find(_VALUE, source.at), source.body.find(CLOSING, source.at)
        if closing >= 0 and (value < 0 or closing < value):
            source.at = closing + len(CLOSING)
            yield _call(source.body[:closing], schemas)
            return
        if value < 0:
            source.at = max(source.at, len(source.body) - len(CLOSING))
            yield None
        elif (end := source.body.find(_VALUE_END, value)) >= 0:  # a value may contain anything but its closing tag
            source.at = end
        else:
            yield None


def _call(body: str, schemas: base.Schemas) -> base.Call:
    name, found, _ = body.partition("<arg_key>")
    if not is_name(name.strip()) or "<" in name:
        raise base.NotACallError
    arguments: dict[str, Any] = {}
    at = len(name) if found else len(body)
    while at < len(body):
        argument = _ARGUMENT.match(body, at)
        if argument is None:
            raise base.NotACallError
        key = argument[1].strip()
        arguments[key] = typed_value(argument[2], schema_of(schemas, name.strip(), key))
        at = argument.end()
    return base.Call(name.strip(), arguments_of(arguments))


create: Final = base.delimited([OPENING], _read)


def rules(callees: Sequence[base.Callee], most: int | None, delimiters: base.Delimiters) -> str:
    calls = base.any_call(callees, partial(_call_rule, delimiters.whitespace))
    frame = base.each_framed(OPENING, f"call {delimiters(CLOSING)}", most, delimiters)
    return f"{frame}{calls}{unquoted_rule(_VALUE_END)}RAW: /[^<]*/\n"


def _call_rule(whitespace: str, index: int, callee: base.Callee) -> str:
    def opening(name: str, is_text: bool) -> str:
        del is_text
        return f'{literal(f"<arg_key>{name}</arg_key>")} WS? "{_VALUE}"'

    arguments = arguments_term(callee, opening, _VALUE_END, whitespace)
    if arguments is None:
        arguments = f'("<arg_key>" RAW "</arg_key>" WS? "{_VALUE}" unquoted WS?)*'
    return f"call{index}: {literal(callee.name)} WS? {arguments}\n"
