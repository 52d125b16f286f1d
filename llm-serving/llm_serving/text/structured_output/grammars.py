"""Response formats as grammars: the languages in which clients ask, translated to that of llguidance.

A grammar is a list of parts. The first is where a response starts; in llguidance's language (a Lark with extensions)
it may refer to others as `@name`.

All tokens whose texts match the grammar are allowed, also where the following text is certain. To find the tokens
that a tokenizer would choose for such a text takes unbounded time, because the text may be a million characters long.

Formats such as dates are narrowed by a pattern beside the format where the compiler accepts too much (it knows no
leap years, and accepts a second 60 in any minute), so that a client that validates the response does not reject it.
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
    "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"  # not in 1900, but in 2000
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
"""What may stand between the parts of a JSON text, once at each place: bounded, as a model that begins with it may find
no end."""
MAX_INT: Final = 2**53
MAX_INT_CHARS: Final = 20
_OPTIONS: Final = '\n%llguidance {"no_forcing": true}\n'
_LARK: Final = re.compile(r"(?m)^[^\S\n]*(?:%llguidance\b|start\s*:)")
_BEGINNING: Final = "start: @answer"
_Part = Mapping[str, Any]


def fault_in(schema: Any, error: str, error_of: Callable[[Any], str | None]) -> str:
    """A JSON pointer to the innermost part that has the same error alone, with the definitions of the whole beside it.

    Args:
        schema: It cannot be compiled.
        error: What is said of it.
        error_of: What is said of another schema; None: nothing.

    Returns:
        "#" for the whole.
    """
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema} if isinstance(schema, dict) else {}
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
    """As RFC 6901 writes it in a URI fragment."""
    return "#" + "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)


def narrow_formats(schema: dict[str, Any]) -> None:
    """Adds to each part of a schema with such a format the rule that it lacks; a second time nothing."""
    parts = [schema]
    while parts:
        part = parts.pop()
        parts += [each for _, each in parts_of(part) if isinstance(each, dict)]
        name, others = part.get("format"), part.get("allOf", [])
        rule = _RULES.get(name) if isinstance(name, str) else None
        if rule is not None and isinstance(others, list) and rule not in others:
            part["allOf"] = [*others, rule]


class GrammarError(LLMServingError):
    """What a client gave is no grammar, or none that can be kept to; the message tells where."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must be.

    Attributes:
        text: In the form that llguidance compiles. Equal texts are the same grammar.
    """

    text: str

    @property
    def parts(self) -> list[_Part]:
        parts: list[_Part] = json.loads(self.text)["grammars"]
        return parts

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


def json_options(whitespace: str, **others: Any) -> dict[str, Any]:
    """What stands beside a schema in a grammar; `whitespace`: as for `json_grammar`."""
    spaces = {"whitespace_pattern": whitespace} if whitespace else {"whitespace_flexible": False}
    return {"x-guidance": {**spaces, **others}}


def json_grammar(
    schema: str, whitespace: str = WHITESPACES[JsonWhitespaceName.SPACE], *, lenient: bool = False
) -> Grammar:
    """JSON texts of a schema, whose properties come in the order in which it names them.

    Args:
        schema: A JSON object, as text.
        whitespace: Regular expression of what may stand between the parts of a text; empty: nothing.
        lenient: Leave out of account what cannot be kept to.

    Raises:
        GrammarError: It is no JSON object, or has integers that would be rounded.
    """
    try:
        content = json.loads(schema, parse_int=_exact)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"is no JSON schema: {error}") from None
    if not isinstance(content, dict):
        raise GrammarError("must be a JSON schema, an object")
    narrow_formats(content)
    return _begun({"json_schema": {**content, **json_options(whitespace, lenient=lenient)}})


def regex_grammar(regex: str) -> Grammar:
    """Texts that a regular expression matches as a whole."""
    return _begun(json.loads(LLMatcher.grammar_from_regex(regex))["grammars"][0])


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """Any of these texts."""
    return lark_grammar("start: " + " | ".join(literal(each) for each in choices))


def any_grammar(text: str) -> Grammar:
    """What a grammar in the language of Lark describes, or in that of GBNF (`root ::= ...`, also called EBNF).

    Raises:
        GrammarError: It is neither.
    """
    try:
        return lark_grammar(text if is_lark(text) else gbnf_to_lark(text))
    except RecursionError:
        raise GrammarError("is nested too deeply") from None
    except Exception as error:  # noqa: BLE001  the converter raises whatever its parser meets
        raise GrammarError(f"is no grammar: {error}") from None


def is_lark(text: str) -> bool:
    """Whether a grammar is in the language of Lark; a line of it begins the rule `start` or an option.

    Blank lines are never looked at together: the library's own search, one call that nothing interrupts, takes the
    square of their number.
    """
    return _LARK.search(text) is not None


def lark_grammar(text: str, **named: Grammar) -> Grammar:
    """A grammar in the language of llguidance; `@name` in it stands for the grammar of that name, one of a
    single part."""
    parts: list[_Part] = [{"lark_grammar": text + _OPTIONS}]
    for name, grammar in named.items():
        *_, part = grammar.parts
        assert len(grammar.parts) == 1 or grammar.parts[0]["lark_grammar"] == _BEGINNING + _OPTIONS
        parts.append({**part, "name": name})
    return Grammar(json.dumps({"grammars": parts}, ensure_ascii=False))


def _begun(part: _Part) -> Grammar:
    return lark_grammar(_BEGINNING, answer=Grammar(json.dumps({"grammars": [part]}, ensure_ascii=False)))


def _exact(text: str) -> int:
    """An integer; llguidance computes in double precision."""
    value = int(text) if len(text) <= MAX_INT_CHARS else MAX_INT + 1
    if abs(value) > MAX_INT:
        raise ValueError(f"integers must be from -{MAX_INT} to {MAX_INT}")
    return value


def literal(text: str) -> str:
    """A text as it stands in a Lark grammar."""
    return json.dumps(text)
