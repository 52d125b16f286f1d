"""String formats of JSON schemas: a grammar allows exactly what a validator accepts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llm_serving.text.structured_output import GrammarError
from llm_serving.text.structured_output.grammars import json_grammar
from support.constraint_runs import allowed_ids
from support.fake_constraints import END, LetterTokenizer, constraint_of
from support.schemas import fault_of

TEXTS = {
    "date": ["2024-02-29", "2000-02-29", "1999-12-31", "2023-02-29", "1900-02-29", "2023-04-31", "2024-02-30"],
    "time": ["23:59:59Z", "06:04:00.5+02:00", "06:04:60Z", "24:00:00Z"],
    "date-time": ["2024-02-29T10:00:00Z", "2023-02-29T10:00:00Z", "1621-12-17T17:20:60.527z"],
    "email": ["a@b.org", f"{'a' * 64}@b", f"{'a' * 65}@b", f"a@{'b' * 63}.org", f"a@{'b' * 64}.org", f"a{'@b' * 2}"],
}
CASES = [pytest.param(name, text, id=text[:30]) for name, texts in TEXTS.items() for text in texts]


def is_allowed(schema: dict[str, Any], answer: str) -> bool:
    matcher, output = constraint_of(json_grammar(json.dumps(schema))).create_matcher(), list[int]()
    for token_id in [*LetterTokenizer().encode(answer), END]:
        if token_id not in allowed_ids(matcher.allowed_words(output)):
            return False
        output.append(token_id)
    return True


@pytest.mark.parametrize(("name", "text"), CASES)
def test_format_accepts_exactly_its_texts(name: str, text: str) -> None:
    schema, answer = {"type": "string", "format": name}, json.dumps(text)
    assert is_allowed(schema, answer) == (fault_of(schema, answer) is None)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["2023-02-29", "2024-02-29"], "format": "date"},
        {"$ref": "#/$defs/day", "format": "date", "$defs": {"day": {"type": "string"}}},
        {"allOf": [{"pattern": "^20"}], "format": "date"},
        {"anyOf": [{"type": "null"}, {"type": "string", "format": "date"}]},
    ],
)
def test_format_applies_beside_other_rules(schema: dict[str, Any]) -> None:
    assert is_allowed(schema, '"2024-02-29"')
    assert not is_allowed(schema, '"2023-02-29"')


def test_schema_property_may_be_named_format() -> None:
    schema = {"type": "object", "properties": {"format": {"const": 1}}, "additionalProperties": False}
    assert is_allowed(schema, '{"format":1}')


def test_contradictory_format_error_contains_a_json_pointer() -> None:
    schema = {"type": "string", "format": "date", "maxLength": 9}
    with pytest.raises(GrammarError, match=r"at #: Unsatisfiable"):
        constraint_of(json_grammar(json.dumps(schema)))
