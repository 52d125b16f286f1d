"""Structured output: the fields of all protocols lead to the same grammars, and errors name the given field."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from typing import Any

import pytest
from jsonschema_rs import validator_for
from llm_serving.errors import RequestError
from llm_serving.server.generation import structured_output
from llm_serving.server.parsing.offload import FairThreads
from llm_serving.server.protocols.openai.schemas import CompletionRequest
from support.constraint_runs import allowed_ids, random_answer
from support.fakes import DEMO_TOKENIZER, FakeEngine
from support.server_client import error_of, post

COMPLETIONS, CHAT, TGI = "/v1/completions", "/v1/chat/completions", "/generate"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    TGI: {"inputs": "x"},
}
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": [1, 2]}, "ok": {"type": "boolean"}},
    "required": ["size", "ok"],
    "additionalProperties": False,
}


def test_grammar_that_waits_too_long_is_refused_with_retry_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "MAX_WAIT_S", 0.0)
    response, _ = ask(CHAT, response_format={"type": "json_object"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert "`response_format` was not compiled within 0 s" in error_of(response)["message"]


def test_grammar_compilation_is_fair_between_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source has its share of the compiling threads, however its requests are named."""
    gate, order = threading.Event(), []
    monkeypatch.setattr(structured_output, "_COMPILING", FairThreads(1, "test"))
    monkeypatch.setattr(structured_output, "_compile", lambda compiler, form: (gate.wait(), order.append(form)))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for source, number in [*(("a", number) for number in range(20)), ("b", 0)]:
                group.create_task(structured_output.compile_constraint(FakeEngine(), f"{source}{number}", source))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            gate.set()

    asyncio.run(main())
    assert len(order) == 21
    assert order.index("b0") <= 2


def ask(path: str, **fields: Any) -> tuple[Any, FakeEngine]:
    engine = FakeEngine(max_body_bytes=2**20)
    body = {"inputs": "x", "parameters": fields} if path == TGI else BODIES[path] | fields
    return post(engine, path, body), engine


def answers(path: str, **fields: Any) -> set[str | None]:
    """Return random outputs for a request."""
    response, engine = ask(path, **fields)
    assert response.status_code == 200, response.text
    constraint = engine.submitted[0].constraint
    assert constraint is not None
    return {random_answer(constraint, random.Random(seed), 200) for seed in range(12)}


def response_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **more}}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", response_format(SCHEMA)),
        ("response_format", response_format(SCHEMA, strict=True, description="d")),
        ("response_format", response_format(SCHEMA, strict=False)),
        ("response_format", {"type": "json", "value": SCHEMA}),
        ("response_format", {"type": "json_object", "value": SCHEMA}),
        ("structured_outputs", {"json": SCHEMA}),
        ("structured_outputs", {"json": json.dumps(SCHEMA), "whitespace_pattern": " ?", "regex": None}),
        ("guided_json", SCHEMA),
        ("guided_json", json.dumps(SCHEMA)),
        ("json_schema", json.dumps(SCHEMA)),
    ],
)
def test_schema_fields_of_all_spellings_constrain_the_answer(path: str, field: str, value: Any) -> None:
    found = answers(path, **{field: value})
    assert len(found) > 3
    assert all(answer is not None and validator_for(SCHEMA).is_valid(json.loads(answer)) for answer in found)


@pytest.mark.parametrize(
    "value", [{"type": "json", "value": SCHEMA}, {"type": "json_schema", "value": {"schema": SCHEMA}}]
)
def test_tgi_grammar_with_a_schema_constrains_the_answer(value: Any) -> None:
    assert {tuple(json.loads(answer or "")) for answer in answers(TGI, grammar=value)} == {("size", "ok")}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_whitespace_pattern": " ", "guided_regex": "a"}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"choice": ["a"], "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": 5}}, "structured_outputs.whitespace_pattern"),
    ],
)
def test_white_space_pattern_that_lacks_json_or_is_no_text_is_refused(fields: dict[str, Any], param: str) -> None:
    response, engine = ask(COMPLETIONS, **fields)
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert engine.submitted == []


def test_json_object_format_returns_an_object() -> None:
    found = [answer for answer in answers(CHAT, response_format={"type": "json_object"}) if answer is not None]
    assert found
    assert all(isinstance(json.loads(answer), dict) for answer in found)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (CHAT, "guided_regex", "yes|no"),
        (CHAT, "regex", "yes|no"),
        (CHAT, "guided_choice", ["yes", "no", "yes"]),
        (CHAT, "guided_grammar", 'root ::= "yes" | "no"'),
        (COMPLETIONS, "guided_grammar", 'start: "yes" | "no"'),
        (COMPLETIONS, "ebnf", 'root ::= "yes" | "no"'),
        (COMPLETIONS, "structured_outputs", {"choice": ["yes", "no"]}),
        (COMPLETIONS, "structured_outputs", {"regex": "yes|no"}),
        (COMPLETIONS, "structured_outputs", {"grammar": 'start: "yes" | "no"'}),
        (TGI, "grammar", {"type": "regex", "value": "yes|no"}),
    ],
)
def test_choice_regex_and_grammar_fields_constrain_the_answer(path: str, field: str, value: Any) -> None:
    assert answers(path, **{field: value}) == {"yes", "no"}


@pytest.mark.parametrize("value", [{"type": "text"}, None])
def test_text_format_sets_no_constraint(value: Any) -> None:
    _, engine = ask(CHAT, response_format=value, guided_choice=None)
    assert engine.submitted[0].sampling.constraint is None


@pytest.mark.parametrize(
    "fields", [{"guided_json": {}}, {"json_schema": {}}, {"structured_outputs": {"json": {}}}], ids=str
)
def test_empty_schema_requires_json(fields: dict[str, Any]) -> None:
    _, engine = ask(CHAT, **fields)
    constraint = engine.submitted[0].constraint
    assert constraint is not None
    first = b"".join(map(DEMO_TOKENIZER.token_bytes, allowed_ids(constraint.create_matcher().allowed_words([]))))
    assert b"{" in first and b"x" not in first


def test_all_choices_of_a_request_match_the_grammar() -> None:
    _, engine = ask(CHAT, guided_regex="a", n=3)
    [constraint] = {each.constraint for each in engine.submitted}
    assert constraint is not None
    assert {each.sampling.constraint for each in engine.submitted} == {constraint.grammar.text}


BROKEN = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize(
    ("path", "field", "value", "param"),
    [
        (CHAT, "response_format", response_format(BROKEN), "response_format.json_schema.schema"),
        (CHAT, "guided_json", BROKEN, "guided_json"),
        (CHAT, "json_schema", BROKEN, "json_schema"),
        (COMPLETIONS, "structured_outputs", {"json": BROKEN}, "structured_outputs.json"),
    ],
)
def test_invalid_schema_is_refused(path: str, field: str, value: Any, param: str) -> None:
    response, engine = ask(path, **{field: value})
    error = error_of(response)
    assert (response.status_code, error["param"], engine.submitted) == (400, param, [])
    assert error["message"] == (f'`{param}` cannot be compiled at #/properties/a: Unimplemented keys: ["uniqueItems"]')


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "colour": 1}}, "response_format.colour"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_json": '{"const": "\\ud800"}'}, "guided_json"),
        ({"json_schema": '{"const": "\\ude00\\ud83d"}'}, "json_schema"),
        ({"structured_outputs": {"json": '{"const": "\\ud800"}'}}, "structured_outputs.json"),
        ({"response_format": response_format([])}, "response_format.json_schema.schema"),
        ({"response_format": response_format({}, strict="yes")}, "response_format.json_schema.strict"),
        ({"response_format": response_format({}, name=5)}, "response_format.json_schema.name"),
        ({"response_format": response_format({}, description=["x"])}, "response_format.json_schema.description"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json"}}, "response_format.value"),
        ({"response_format": {"type": "json", "schema": {}, "value": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": {}, "value": {}}}, "response_format.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"ebnf": "root ::= ("}, "ebnf"),
        ({"regex": "a", "min_tokens": 1}, "min_tokens"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"regex": "a", "bad_words": ["b"]}, "bad_words"),
        ({"regex": "a", "allowed_token_ids": [7]}, "allowed_token_ids"),
        ({"regex": "a", "use_beam_search": True}, "regex"),
        ({"regex": "a" * 70_000}, "regex"),
    ],
)
def test_structured_output_refuses_incompatible_parameters(fields: dict[str, Any], param: str) -> None:
    response, engine = ask(CHAT, **fields)
    assert (response.status_code, error_of(response)["param"], engine.submitted) == (400, param, [])


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"type": "json", "value": BROKEN}, "`grammar.value` cannot be compiled at #/properties/a"),
        ({"type": "regex", "value": "("}, "`grammar.value` cannot be compiled"),
        ({"type": "lark", "value": "("}, "`grammar.type` must be one of"),
    ],
)
def test_tgi_grammar_refuses_incompatible_parameters(value: Any, named: str) -> None:
    response, _ = ask(TGI, grammar=value)
    assert response.status_code == 422
    assert named in response.json()["error"]
    response, _ = ask(TGI, grammar={"type": "regex", "value": "a"}, min_new_tokens=2)
    assert "`min_new_tokens` is not supported with `grammar.value`" in response.json()["error"]


@pytest.mark.parametrize("schema", ["[" * 2**17, {"enum": ["x" * 2**17]}, {"": "[" * 2**17}])
def test_large_grammar_is_refused_before_parsing(schema, monkeypatch):
    monkeypatch.setattr(structured_output, "json", None)
    form = structured_output.structured_output_of(CompletionRequest(prompt="x", guided_json=schema))
    engine = FakeEngine()
    with pytest.raises(RequestError, match="`guided_json` must have at most 65536 bytes"):
        asyncio.run(structured_output.compile_constraint(engine, form, ""))
