"""Tool calls of GLM-4.5 and later: `<tool_call>name`, `<arg_key>k</arg_key><arg_value>v</arg_value>`, ..."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from llm_serving.text.structured_output.grammars import GrammarError, json_options, literal
from llm_serving.text.tool_parsers.base import (
    Call,
    Callee,
    MarkedCalls,
    Marks,
    NotACallError,
    Read,
    ToolParser,
    any_of,
    repeated,
)
from llm_serving.text.tool_parsers.json_text import arguments_of, is_name, parsed

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"
_VALUE: Final = "<arg_value>"
_VALUE_END: Final = "</arg_value>"
_TEXT_KEYS: Final = frozenset(("pattern", "format", "minLength", "maxLength"))
_COMPOUND_KEYS: Final = frozenset(("$ref", "anyOf", "oneOf", "allOf"))
_ARGUMENT: Final = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


class _Reader:
    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self._at = 0

    def read(self, body: str, *, ended: bool) -> Read | None:
        del ended
        while True:
            value, closing = body.find(_VALUE, self._at), body.find(CLOSING, self._at)
            if closing >= 0 and (value < 0 or closing < value):
                return Read([_call(body[:closing], self._schemas)], closing + len(CLOSING))
            if value < 0:
                self._at = max(self._at, len(body) - len(CLOSING))
                return None
            end = body.find(_VALUE_END, value)  # a value may contain anything except its closing
            if end < 0:
                return None
            self._at = end


def _call(body: str, schemas: Mapping[str, Mapping[str, Any]]) -> Call:
    name, found, _ = body.partition("<arg_key>")
    if not is_name(name.strip()) or "<" in name:
        raise NotACallError
    arguments: dict[str, Any] = {}
    properties = schemas.get(name.strip(), {}).get("properties")
    at = len(name) if found else len(body)
    while at < len(body):
        argument = _ARGUMENT.match(body, at)
        if argument is None:
            raise NotACallError
        key = argument[1].strip()
        arguments[key] = _value(argument[2], properties.get(key) if isinstance(properties, dict) else None)
        at = argument.end()
    return Call(name.strip(), arguments_of(arguments))


def _value(text: str, schema: Any) -> Any:
    """Return an argument's value: JSON, or the text itself. If the text is also valid JSON, the schema decides."""
    try:
        value = parsed(text)
    except NotACallError:
        return text
    if isinstance(value, str):
        return value if json.dumps(value) == text.strip() else text
    kinds = _kinds_of_any(schema)
    return text if "string" in kinds and not kinds & _KINDS[type(value)] else value


def _kinds_of_any(schema: Any) -> set[str]:
    """Return the JSON types that a schema or its alternatives allow; empty if unspecified."""
    about = schema if isinstance(schema, dict) else {}
    listed = about.get("anyOf", about.get("oneOf"))
    kinds = [_kinds(each) for each in (listed if isinstance(listed, list) else [about])]
    return set().union(*kinds) if all(kinds) else set()


def _kinds(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    values = schema.get("enum", [schema["const"]] if "const" in schema else ())
    if isinstance(values, list) and values:
        return set().union(*(_KINDS[type(each)] for each in values))
    kinds = schema.get("type", [])
    return {each for each in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(each, str)}


_KINDS: Final[Mapping[type, frozenset[str]]] = {
    str: frozenset(("string",)),
    bool: frozenset(("boolean",)),
    int: frozenset(("integer", "number")),
    float: frozenset(("number",)),
    type(None): frozenset(("null",)),
    list: frozenset(("array",)),
    dict: frozenset(("object",)),
}


def create(schemas: Mapping[str, Mapping[str, Any]]) -> ToolParser:
    """Return a parser. It needs the schemas to distinguish numbers from texts that look like numbers."""
    return MarkedCalls(OPENING, partial(_Reader, schemas))


def rules(callees: Sequence[Callee], most: int | None, marks: Marks) -> str:
    """Return the grammar rules (see `base`): arguments have the names and the order of their schema, texts are not
    quoted, and of other constraints only the list of allowed values is enforced.
    """
    rest = f"call {marks(CLOSING)}"
    times = "*" if most is None else f"{{0,{most}}}"
    calls = "".join(_call_rule(f"call{i}", each, marks.whitespace) for i, each in enumerate(callees))
    return (
        f"calls: {repeated('whole', 'WS?', most)}\n"
        f"whole: {marks(OPENING)} {rest}\n"
        f"free: (opened {rest}){times} TEXT?\n"
        f"{marks.up_to('opened', OPENING)}"
        f"call: {any_of(callees)}\n{calls}"
        "RAW: /[^<]*/\n"
    )


def _call_rule(rule: str, callee: Callee, whitespace: str) -> str:
    properties, required = callee.schema.get("properties"), callee.schema.get("required", ())
    if not isinstance(properties, dict):
        argument = '"<arg_key>" RAW "</arg_key>" WS? "<arg_value>" RAW "</arg_value>" WS?'
        return f"{rule}: {literal(callee.name)} WS? ({argument})*\n"
    definitions: dict[str, Any] = {
        name: callee.schema[name] for name in ("$defs", "definitions") if name in callee.schema
    }
    values = {name: _value_rule(each, definitions, callee, whitespace) for name, each in properties.items()}
    parts = [
        f'({literal(f"<arg_key>{name}</arg_key>")} WS? "<arg_value>" {value} "</arg_value>" WS?)'
        f"{'' if name in required else '?'}"
        for name, value in values.items()
    ]
    return f"{rule}: {literal(callee.name)} WS? {' '.join(parts)}\n"


def _value_rule(schema: Any, definitions: dict[str, Any], callee: Callee, whitespace: str) -> str:
    """Return the grammar term for the value of an argument: strings are unquoted text, other values are JSON."""
    about = schema if isinstance(schema, dict) else {}
    texts = about.get("enum", [about["const"]] if "const" in about else ())
    if texts and all(isinstance(each, str) for each in texts):
        return "(" + " | ".join(literal(each) for each in texts) + ")"
    if about.get("type", "string") == "string" and not _COMPOUND_KEYS & about.keys():
        if callee.strict and (others := sorted(_TEXT_KEYS & about.keys())):
            raise GrammarError(f"cannot be enforced in calls of this model: texts with {', '.join(others)}")
        return "RAW"
    return "%json " + json.dumps({**definitions, **about, **json_options(whitespace)})
