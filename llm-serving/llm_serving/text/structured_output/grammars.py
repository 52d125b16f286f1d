"""Response formats as grammars: JSON schema, regular expression, choice, Lark and GBNF, translated for llguidance.

A grammar consists of parts. The first part describes the whole response. A part in llguidance's language (Lark with
extensions) refers to another part as `@name`. Every token whose text matches is allowed. Where only one text is left,
the model may still divide it into any tokens.

For some formats in JSON schemas, the compiler is too permissive. For example, it accepts 29 February of any year as a
`date`. This module adds a pattern to parts of a schema with such a format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from llm_serving.core.enums import JsonWhitespaceName
from llm_serving.errors import LLMServingError

MAX_TRIALS: Final = 64
_BY_NAME: Final = ("$defs", "definitions", "properties", "patternProperties")
_SCHEMAS: Final = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
_SCHEMA: Final = ("items", "additionalProperties", "not")
_DEFINITIONS: Final = ("$defs", "definitions")

Path = tuple[str | int, ...]

_LEAP_DAY: Final = (
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"  # not 1900, but 2000
)
_DATE: Final = f"(?:[0-9]{{4}}-(?:[0-9]{{2}}-(?:[01][0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|3[01]))|{_LEAP_DAY})"
_SECOND: Final = "[0-9:]{6}[0-5]"
_RULES: Final[Mapping[str, Mapping[str, Any]]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_SECOND}"},
    "date-time": {"pattern": f"^{_DATE}[tT]{_SECOND}"},
    "email": {"pattern": r"^[^@]{1,64}@[^@.]{1,63}(?:\.[^@.]{1,63})*$", "maxLength": 254},
}
WHITESPACES: Final[Mapping[str, str]] = {
    JsonWhitespaceName.NONE: "",
    JsonWhitespaceName.SPACE: " ",
    JsonWhitespaceName.LINES: r"[\x20\x0A\x0D\x09]{1,32}",
}
"""Setting -> regular expression of white space in a JSON text, limited because a model might repeat it endlessly."""
MAX_INT: Final = 2**53
MAX_INT_CHARS: Final = 20
_OPTIONS: Final = '\n%llguidance {"no_forcing": true}\n'
_LARK: Final = re.compile(r"(?m)^[^\S\n]*(?:%llguidance\b|start\s*:)")
_START: Final = "start: @answer"
_Part = Mapping[str, Any]


def definitions_of(schema: Any) -> dict[str, Any]:
    return {name: schema[name] for name in _DEFINITIONS if name in schema} if isinstance(schema, dict) else {}


def fault_in(schema: Any, error: str, error_of: Callable[[Any], str | None]) -> str:
    """Return a JSON pointer to the smallest part of `schema` that alone makes `error_of` return `error`."""
    definitions = definitions_of(schema)
    path: Path = ()
    trials = 0
    while True:
        for step, part in parts_of(schema):
            trials += 1
            if trials > MAX_TRIALS:
                return _pointer(path)
            if isinstance(part, dict) and error_of({**definitions, **part} if path or definitions else part) == error:
                path, schema = (*path, *step), part
                break
        else:
            return _pointer(path)


def parts_of(schema: Any) -> Iterator[tuple[Path, Any]]:
    if not isinstance(schema, dict):
        return
    for key in _BY_NAME:
        if isinstance(named := schema.get(key), dict):
            yield from (((key, name), part) for name, part in named.items())
    for key in _SCHEMAS:
        if isinstance(listed := schema.get(key), list):
            yield from (((key, index), part) for index, part in enumerate(listed))
    for key in _SCHEMA:
        if isinstance(part := schema.get(key), dict):
            yield (key,), part


def _pointer(path: Path) -> str:
    return "#" + "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)


def narrow_formats(schema: dict[str, Any]) -> None:
    """Add a pattern of `_RULES` to each part of a schema whose `format` the compiler enforces too permissively."""
    parts = [schema]
    while parts:
        part = parts.pop()
        parts += [each for _, each in parts_of(part) if isinstance(each, dict)]
        name, others = part.get("format"), part.get("allOf", [])
        rule = _RULES.get(name) if isinstance(name, str) else None
        if rule is not None and isinstance(others, list) and rule not in others:
            part["allOf"] = [*others, rule]


class GrammarError(LLMServingError):
    """A client's grammar is invalid or unsupported. The message names the faulty part."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an answer must match, as the text that llguidance compiles. Equal texts are equal grammars."""

    text: str

    @property
    def parts(self) -> list[_Part]:
        parts: list[_Part] = json.loads(self.text)["grammars"]
        return parts

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


def json_options(whitespace: str, **others: Any) -> dict[str, Any]:
    """Return the entry `x-guidance` of a JSON schema: the options `others` and `whitespace` (see `json_grammar`)."""
    spaces = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    return {"x-guidance": {**spaces, **others}}


def json_grammar(
    schema: str, whitespace: str = WHITESPACES[JsonWhitespaceName.SPACE], *, lenient: bool = False
) -> Grammar:
    """Return a grammar of the JSON texts that match a schema. Properties have the order of the schema.

    `schema`: JSON text of the schema. `whitespace`: regular expression of the white space between the elements of the
    JSON text. `lenient`: ignore unsupported constraints. Raise GrammarError if the schema is not a JSON object, or has
    integers beyond `MAX_INT`.
    """
    try:
        content = json.loads(schema, parse_int=_exact)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"is not a JSON schema: {error}") from None
    if not isinstance(content, dict):
        raise GrammarError("must be a JSON schema, an object")
    narrow_formats(content)
    return _whole_answer({"json_schema": {**content, **json_options(whitespace, lenient=lenient)}})


def regex_grammar(regex: str) -> Grammar:
    return _whole_answer(json.loads(LLMatcher.grammar_from_regex(regex))["grammars"][0])


def choice_grammar(choices: Sequence[str]) -> Grammar:
    return lark_grammar("start: " + " | ".join(literal(each) for each in choices))


def any_grammar(text: str) -> Grammar:
    """Return the grammar that a text describes in Lark or GBNF (`root ::= ...`), or raise GrammarError."""
    try:
        return lark_grammar(text if is_lark(text) else gbnf_to_lark(text))
    except RecursionError:
        raise GrammarError("is nested too deeply") from None
    except Exception as error:  # noqa: BLE001  the converter raises whatever its parser meets
        raise GrammarError(f"is not a grammar: {error}") from None


def is_lark(text: str) -> bool:
    """Return whether a grammar is Lark, not GBNF: a line begins with `%llguidance` or with the rule `start`."""
    return _LARK.search(text) is not None


def lark_grammar(text: str, **named: Grammar) -> Grammar:
    """Return the grammar that `text` describes in llguidance's language, in which `@name` refers to `named[name]`. A
    grammar in `named` must have one part, without `@name`, or the two parts that `_whole_answer` makes.
    """
    parts: list[_Part] = [{"lark_grammar": text + _OPTIONS}]
    for name, grammar in named.items():
        *_, part = grammar.parts
        assert len(grammar.parts) == 1 or grammar.parts[0]["lark_grammar"] == _START + _OPTIONS
        parts.append({**part, "name": name})
    return Grammar(json.dumps({"grammars": parts}, ensure_ascii=False))


def _whole_answer(part: _Part) -> Grammar:
    return lark_grammar(_START, answer=Grammar(json.dumps({"grammars": [part]}, ensure_ascii=False)))


def _exact(text: str) -> int:
    """Return the integer in `text`. Raise ValueError beyond `MAX_INT`, because llguidance rounds larger integers."""
    value = int(text) if len(text) <= MAX_INT_CHARS else MAX_INT + 1
    if abs(value) > MAX_INT:
        raise ValueError(f"integers must be from -{MAX_INT} to {MAX_INT}")
    return value


def literal(text: str) -> str:
    return json.dumps(text)
