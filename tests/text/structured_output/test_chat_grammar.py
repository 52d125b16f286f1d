"""Random outputs match the grammar of a chat answer: reasoning, calls in every format, structured output."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from jsonschema_rs import validator_for
from llm_serving.text.answer_parser import REASONING_FORMATS, THINK
from llm_serving.text.structured_output import Grammar, GrammarError
from llm_serving.text.structured_output.chat_grammar import AnswerReasoning, Calls, answer_grammar
from llm_serving.text.structured_output.grammars import json_grammar
from llm_serving.text.tool_parsers import TOOL_FORMATS, Call, Callee, Delimiters
from support.constraint_runs import allowed_ids, random_answer
from support.fakes import DEMO_CONSTRAINTS, DEMO_TOKENIZER

TEXT_DELIMITERS = Delimiters(lambda text: None)
SIZE: dict[str, Any] = {
    "type": "object",
    "properties": {"size": {"$ref": "#/$defs/size"}, "unit": {"enum": ["cm", "m"]}},
    "required": ["size"],
    "additionalProperties": False,
    "$defs": {"size": {"type": "integer", "minimum": 1, "maximum": 99}},
}
ON: dict[str, Any] = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
TOOLS = (Callee("set_size", SIZE, strict=True), Callee("switch", ON | {"additionalProperties": False}, strict=True))
SCHEMAS = {each.name: each.schema for each in TOOLS}


def calls_in(form: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text and the calls of a complete answer."""
    parser = TOOL_FORMATS[form].create(SCHEMAS)
    parts = [*parser.add(text), *parser.flush()]
    calls: list[Call] = []
    for part in parts:
        if isinstance(part, Call):
            calls = [*calls, part] if part.name else [*calls[:-1], Call(calls[-1].name, calls[-1].arguments + part[1])]
    content = "".join(part for part in parts if isinstance(part, str))
    return content, [(call.name, json.loads(call.arguments)) for call in calls]


def answers(grammar: Grammar, count: int = 10, max_tokens: int = 200) -> list[str]:
    """Return the answers that are complete."""
    constraint = DEMO_CONSTRAINTS.compiled(grammar)
    found = [random_answer(constraint, random.Random(seed), max_tokens) for seed in range(count)]
    return [each for each in found if each is not None]


@pytest.mark.parametrize("most", [1, 2, None])
@pytest.mark.parametrize("form", TOOL_FORMATS)
def test_grammar_requires_between_one_and_the_limit_of_calls(form: str, most: int | None) -> None:
    calls = Calls(TOOL_FORMATS[form], TOOLS, must=True, most=most)
    found = answers(answer_grammar(None, calls, None, TEXT_DELIMITERS))
    assert found
    for text in found:
        content, called = calls_in(form, text)
        assert not content.strip()
        assert 1 <= len(called) <= (most or 100)
        for name, arguments in called:
            assert validator_for(SCHEMAS[name]).is_valid(arguments), text


@pytest.mark.parametrize(
    ("form", "before", "after"),
    [
        ("glm", "<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>", "</arg_value></tool_call>"),
        ("qwen_xml", "<tool_call>\n<function=say>\n<parameter=text>\n", "\n</parameter>\n</function>\n</tool_call>"),
        ("seed", "<seed:tool_call><function=say><parameter=text>", "</parameter></function></seed:tool_call>"),
        (
            "deepseek_dsml",
            '<｜DSML｜function_calls><｜DSML｜invoke name="say"><｜DSML｜parameter name="text" string="true">',
            "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
        ),
    ],
)
@pytest.mark.parametrize("schema", [{}, {"properties": {"text": {"type": "string"}}}])
def test_unquoted_strings_may_contain_any_characters(
    form: str, before: str, after: str, schema: dict[str, Any]
) -> None:
    text = 'if a < b: "x" </b>\n<function=say> </parameter'
    calls = Calls(TOOL_FORMATS[form], [Callee("say", schema)], must=True, most=1)
    grammar = answer_grammar(None, calls, None, TEXT_DELIMITERS)
    assert DEMO_TOKENIZER.eos_token_ids[0] in allowed_after(grammar, before + text + after)
    assert calls_in(form, before + text + after) == ("", [("say", {"text": text})])


@pytest.mark.parametrize("whitespace", ["", " "])
@pytest.mark.parametrize("form", ["hermes", "llama", "mistral", "granite", "hunyuan", "cohere"])
def test_arguments_follow_the_json_white_space_setting(form: str, whitespace: str) -> None:
    calls = Calls(TOOL_FORMATS[form], TOOLS, must=True, most=1)
    for text in answers(answer_grammar(None, calls, None, Delimiters(lambda text: None, whitespace))):
        frame = text[text.index("{") : text.rindex("{")]
        assert max(map(len, re.findall(r"\s*", frame))) <= len(whitespace), text


@pytest.mark.parametrize(
    ("form", "begun"),
    [
        ("hermes", 'Let me see.\n<tool_call>\n{"name": "'),
        ("llama", '{"name": "'),
        ("mistral", 'Well [TOOL_CALLS][{"name": "'),
        ("glm_lines", "s"),
        ("glm", "I ask.\n<tool_call>"),
        ("qwen_xml", "I ask.\n<tool_call><function="),
        ("qwen_xml", "I ask.\n<function="),
        ("qwen_xml", "<function=switch>\n<parameter=on>\ntrue\n</parameter>\n</function>\n</tool_call>\n<function="),
        ("seed", "<seed:tool_call>\n<function="),
        ("minimax", 'Well <minimax:tool_call>\n<invoke name="'),
        ("deepseek_dsml", 'Well <｜DSML｜function_calls>\n<｜DSML｜invoke name="'),
        ("minicpm", "I ask.<|tool_call_start|>\n```python\n"),
        ("deepseek", "Well <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"),
        ("deepseek_fenced", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"),
        (
            "harmony",
            "<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant<|channel|>commentary to=functions.",
        ),
        ("granite", 'I ask.<|tool_call|>[{"name": "'),
        ("granite", 'I ask.<tool_call>[{"name": "'),
        ("hunyuan", '<tool_calls>[{"name": "'),
        ("nemotron", '<TOOLCALL>[{"name": "'),
        ("cohere", '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "'),
        ("lfm2", "I ask.<|tool_call_start|>["),
        ("olmo", "I ask.\n<function_calls>\n"),
        ("gemma", "I ask.<|tool_call>call:"),
        ("kimi", "I ask.<|tool_calls_section_begin|><|tool_call_begin|>functions."),
    ],
)
def test_grammar_continues_an_opened_call_as_a_call(form: str, begun: str) -> None:
    thinking = AnswerReasoning(REASONING_FORMATS["harmony"], None) if form == "harmony" else None
    grammar = answer_grammar(None, Calls(TOOL_FORMATS[form], TOOLS, must=False, most=None), thinking, TEXT_DELIMITERS)
    follows = {DEMO_TOKENIZER.token_text(each) for each in allowed_after(grammar, begun)}
    assert "s" in follows
    assert form == "glm_lines" or follows.isdisjoint({"x", "1", "]"})
    hello = "<|channel|>final<|message|>Hello" if form == "harmony" else "Hello"
    assert {"x", "1", "]"} <= {DEMO_TOKENIZER.token_text(each) for each in allowed_after(grammar, hello)}


def test_grammar_allows_structured_output_or_calls() -> None:
    calls = Calls(TOOL_FORMATS["hermes"], TOOLS, must=False, most=None)
    found = answers(answer_grammar(json_grammar(json.dumps(ON)), calls, None, TEXT_DELIMITERS), 30)
    assert {text[0] for text in found} == {"{", "<"}


@pytest.mark.parametrize(("is_open", "before"), [(True, "Hm.</think>"), (False, "<think>Hm.</think>\n\n"), (False, "")])
def test_grammar_allows_reasoning_before_the_answer(is_open: bool, before: str) -> None:
    grammar = answer_grammar(json_grammar('{"const": 1}'), None, AnswerReasoning(THINK, is_open), TEXT_DELIMITERS)
    assert {DEMO_TOKENIZER.token_text(each) for each in allowed_after(grammar, before)} >= {"1"}
    assert "2" not in {DEMO_TOKENIZER.token_text(each) for each in allowed_after(grammar, before)}


@pytest.mark.parametrize("special", [{}, {"<|START_RESPONSE|>": 1, "<|END_RESPONSE|>": 3}])
@pytest.mark.parametrize("must_match", [True, False])
def test_grammar_allows_text_around_the_answer(special: dict[str, int], must_match: bool) -> None:
    form = json_grammar('{"const": 1}') if must_match else None
    thinking = AnswerReasoning(REASONING_FORMATS["cohere"], is_open=False)
    grammar = answer_grammar(form, None, thinking, Delimiters(special.get))

    def may_end_after(*parts: str) -> bool:
        matcher = DEMO_CONSTRAINTS.compiled(grammar).create_matcher()
        ids = [each for part in parts for each in ([special[part]] if part in special else tokens_of(part))]
        return DEMO_TOKENIZER.eos_token_ids[0] in allowed_ids(matcher.allowed_words(ids))

    thought = "" if special else "<|START_THINKING|>Hm.<|END_THINKING|>"
    assert may_end_after("1")
    assert may_end_after(thought, "<|START_RESPONSE|>", "1", "<|END_RESPONSE|>")
    assert may_end_after("<|START_RESPONSE|>", "2", "<|END_RESPONSE|>") != must_match


def test_grammar_of_a_channel_format_allows_channels_answers_and_calls() -> None:
    special = {"<|channel|>": 0, "<|message|>": 1, "<|end|>": 3}
    form = json_grammar('{"const": 7}')
    calls = Calls(TOOL_FORMATS["harmony"], TOOLS, must=False, most=None)
    for budget in (None, 2):
        thinking = AnswerReasoning(REASONING_FORMATS["harmony"], is_open=False, budget=budget)
        matcher = DEMO_CONSTRAINTS.compiled(
            answer_grammar(form, calls, thinking, Delimiters(special.get))
        ).create_matcher()
        thought = [0, *tokens_of("analysis"), 1, *tokens_of("Hm"), 3, *tokens_of("<|start|>assistant")]
        if budget is not None:
            assert allowed_ids(matcher.allowed_words(thought[: -len(tokens_of("<|start|>assistant")) - 1])) == [3]
        for begun in ([], thought):
            assert 0 in allowed_ids(matcher.allowed_words(begun))
            assert tokens_of("7")[0] not in allowed_ids(matcher.allowed_words(begun))
            answer = [*begun, 0, *tokens_of("final"), 1, *tokens_of("7")]
            assert DEMO_TOKENIZER.eos_token_ids[0] in allowed_ids(matcher.allowed_words(answer))
            call = [*begun, 0, *tokens_of("commentary to=functions.switch json"), 1]
            assert {DEMO_TOKENIZER.token_text(each)[0] for each in allowed_ids(matcher.allowed_words(call))} == {"{"}


def test_grammar_refers_to_special_token_marks_by_id() -> None:
    special = {"[TOOL_CALLS]": 1, "[ARGS]": 3}
    calls = Calls(TOOL_FORMATS["mistral"], TOOLS, must=True, most=1)
    matcher = DEMO_CONSTRAINTS.compiled(answer_grammar(None, calls, None, Delimiters(special.get))).create_matcher()
    assert allowed_ids(matcher.allowed_words([])) == [1]
    named = tokens_of("switch")
    assert 3 in allowed_ids(matcher.allowed_words([1, *named]))
    assert {DEMO_TOKENIZER.token_text(each) for each in allowed_ids(matcher.allowed_words([1, *named, 3]))} == {"{"}


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("form", [None, json_grammar('{"const": 7}')])
def test_grammar_ends_reasoning_at_its_budget(form: Grammar | None, budget: int) -> None:
    """Reasoning may end in the middle of a character; structured output follows."""
    opening, closing = 0, 1
    delimiters = Delimiters({"<think>": opening, "</think>": closing}.get)
    for thinks_open in (True, False):
        constraint = DEMO_CONSTRAINTS.compiled(
            answer_grammar(form, None, AnswerReasoning(THINK, thinks_open, budget), delimiters)
        )
        for seed in range(6):
            output = [] if thinks_open else [opening]
            matcher, choice = constraint.create_matcher(), random.Random(seed).choice
            for _ in range(budget):
                allowed = allowed_ids(matcher.allowed_words(output))
                letters = [each for each in allowed if seed % 2 and DEMO_TOKENIZER.token_bytes(each)[-1:] >= b"\x80"]
                assert closing in allowed or letters  # not in the middle of one
                output.append(choice([each for each in letters or allowed if each != closing]))
            assert allowed_ids(matcher.allowed_words(output)) == [closing]
            assert tokens_of("7")[0] in allowed_ids(matcher.allowed_words([*output, closing]))


def test_reasoning_budget_needs_a_closing_token() -> None:
    with pytest.raises(GrammarError, match="the model has no token for </think>"):
        answer_grammar(None, None, AnswerReasoning(THINK, True, 5), TEXT_DELIMITERS)


def test_unsupported_constraints_of_a_lenient_tool_are_ignored() -> None:
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for strict in (False, True):
        calls = Calls(TOOL_FORMATS["hermes"], [Callee("f", unique, strict)], must=True, most=1)
        grammar = answer_grammar(None, calls, None, TEXT_DELIMITERS)
        if strict:
            with pytest.raises(GrammarError, match="uniqueItems"):
                DEMO_CONSTRAINTS.compiled(grammar)
        else:
            DEMO_CONSTRAINTS.compiled(grammar)


def allowed_after(grammar: Grammar, text: str) -> list[int]:
    return allowed_ids(DEMO_CONSTRAINTS.compiled(grammar).create_matcher().allowed_words(tokens_of(text)))


def tokens_of(text: str) -> list[int]:
    """Return one token for each character, or for each of its bytes."""
    table = [DEMO_TOKENIZER.token_bytes(token_id) for token_id in range(DEMO_TOKENIZER.vocab_size)]
    chars = (char.encode() for char in text)
    pieces = [piece for char in chars for piece in ([char] if char in table else [bytes([byte]) for byte in char])]
    return [table.index(piece) for piece in pieces]
