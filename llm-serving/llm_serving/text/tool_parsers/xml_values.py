"""Arguments that models write between tags: strings without quotes, other values as JSON.

A text such as `1` may be a string or a number. The tool's schema decides which it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from llm_serving.text.structured_output.grammars import GrammarError, definitions_of, json_options, literal
from llm_serving.text.tool_parsers.base import Callee, NotACallError, array_of, escaped
from llm_serving.text.tool_parsers.json_text import parsed

_JSON: Final = "%json"
_TEXT_KEYS: Final = frozenset(("pattern", "format", "minLength", "maxLength"))
_COMPOUND_KEYS: Final = frozenset(("$ref", "anyOf", "oneOf", "allOf"))
_PYTHON: Final[Mapping[str, tuple[str, bool | None]]] = {
    "True": ("boolean", True),
    "False": ("boolean", False),
    "None": ("null", None),
}
"""Literal in Python syntax, as some models write it -> its JSON type and value."""


def schema_of(schemas: Mapping[str, Mapping[str, Any]], tool: str, argument: str) -> Any:
    properties = schemas.get(tool, {}).get("properties")
    return properties.get(argument) if isinstance(properties, dict) else None


def typed_value(text: str, schema: Any) -> Any:
    """Return an argument's value: parsed JSON, or the text itself. If the text is valid JSON, the schema decides."""
    kinds = _kinds_of_any(schema)
    try:
        value = parsed(text)
    except NotACallError:
        kind, value = _PYTHON.get(text.strip(), ("", None))
        return value if kind in kinds and "string" not in kinds else text
    if isinstance(value, str):
        return value if json.dumps(value) == text.strip() else text
    return text if "string" in kinds and not kinds & _KINDS[type(value)] else value


def _kinds_of_any(schema: Any) -> set[str]:
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


def unquoted_rule(closing: str) -> str:
    """Return the grammar rule `unquoted`: any text up to and including the first `closing`."""
    return f"unquoted[lazy]: /(?s:.*){escaped(closing)}/\n"


def arguments_term(callee: Callee, opening: Callable[[str, bool], str], closing: str, whitespace: str) -> str | None:
    """Return the grammar term for the arguments of a call, in the order of the tool's schema, or None if the schema has
    no properties. The grammar enforces `enum` and `const` of strings. Raise GrammarError if a strict tool has another
    constraint on strings, such as `pattern`.

    `callee`: the called tool. `opening(name, is_unquoted)` returns the term before an argument's value. `closing`: text
    after each value; white space may follow it. `whitespace`: see `json_grammar`.
    """
    properties, required = callee.schema.get("properties"), callee.required
    if not isinstance(properties, dict):
        return None
    definitions = definitions_of(callee.schema)
    values = {name: value_term(each, definitions, callee, whitespace) for name, each in properties.items()}
    return " ".join(
        f"({opening(name, not (value or '').startswith(_JSON))} "
        f"{'unquoted' if value is None else f'{value} {literal(closing)}'} WS?)"
        f"{'' if name in required else '?'}"
        for name, value in values.items()
    )


def value_term(schema: Any, definitions: dict[str, Any], callee: Callee, whitespace: str) -> str | None:
    """Return the grammar term for the value of an argument, or None if the value is any unquoted text."""
    about = schema if isinstance(schema, dict) else {}
    texts = [about["const"]] if "const" in about and "enum" not in about else array_of(about, "enum")
    if texts and all(isinstance(each, str) for each in texts):
        return "(" + " | ".join(literal(each) for each in texts) + ")"
    if about.get("type", "string") == "string" and not _COMPOUND_KEYS & about.keys():
        if callee.strict and (others := sorted(_TEXT_KEYS & about.keys())):
            rule = f"calls of this model support no {', '.join(others)} of strings"
            raise GrammarError(f"cannot be enforced: {rule}; leave it out, or set `strict: false`")
        return None
    return f"{_JSON} " + json.dumps({**definitions, **about, **json_options(whitespace)})
