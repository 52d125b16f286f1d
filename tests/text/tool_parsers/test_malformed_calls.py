"""Malformed, incomplete and very long tool calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llm_serving.text.tool_parsers import TOOL_FORMATS, Call
from llm_serving.text.tool_parsers.base import MAX_CALL_CHARS
from support.parsed_calls import ADD, NAMES, WEATHER, answer_of, as_json
from support.tool_cases import WRITERS


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"</tool_call>'),
        ("hermes", '<tool_call>{"name": "other", "arguments": {"a": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "other", "arguments": {"a": 1e999}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "other", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", f'<tool_call>{{"name": "other", "arguments": {{"a": {"[" * 100_000}{"]" * 100_000}}}}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>'),
        ("llama", '{"name": "no such tool", "parameters": {}}'),
        ("llama", '{"answer": 42}'),
        ("mistral", "[TOOL_CALLS] two words {}"),
        ("mistral", f"[TOOL_CALLS]{'x' * 1000}{{}}"),
        ("glm", "<tool_call>add<arg_key>a</arg_key></tool_call>"),
        ("glm_lines", "nobody\n{}"),
        ("qwen_xml", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"),
        ("qwen_xml", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\nx</function></tool_call>"),
        ("qwen_xml", "<tool_call>add</tool_call> <function=a b > <function=>"),
        ("seed", "<seed:tool_call></seed:tool_call>"),
        ("minimax", '<minimax:tool_call><invoke name="add"><parameter name="a">1</invoke></minimax:tool_call>'),
        ("deepseek_dsml", "<｜DSML｜function_calls></｜DSML｜function_calls>"),
        (
            "deepseek_dsml",
            '<｜DSML｜function_calls><｜DSML｜invoke name="add">'
            '<｜DSML｜parameter name="a">1</｜DSML｜parameter></｜DSML｜invoke>',
        ),
        (
            "deepseek_dsml",
            '<｜DSML｜invoke name="add"><｜DSML｜parameter name="a" string="no">1</｜DSML｜parameter></｜DSML｜invoke>',
        ),
        ("deepseek_dsml", f'<｜DSML｜invoke name="{"x" * 257}"></｜DSML｜invoke>'),
        ("minicpm", "<|tool_call_start|>\n```python\n```\n<|tool_call_end|>"),
        ("minicpm", "<|tool_call_start|>\n```python\nimport os\nadd(a=1)\n```\n<|tool_call_end|>"),
        ("minicpm", "<|tool_call_start|>\n```python\nadd(a=1)\n``<|tool_call_end|>"),
        ("minicpm", "<|tool_call_start|>\n```python\nadd(a=open('x').read())\n```\n<|tool_call_end|>"),
        ("deepseek", "<｜tool▁calls▁begin｜>add<｜tool▁calls▁end｜>"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a b<｜tool▁sep｜>{}"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>other<｜tool▁sep｜>{a: 1}<｜tool▁call▁end｜>"),
        ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[add(1)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[add(**{})]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[add(a=1 + 1), add(a=b'x')]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[add(a=1), 5]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[add(a=open('x'))]<|tool_call_end|>"),
        ("lfm2", f"<|tool_call_start|>[add(a={'[' * 10_000}{']' * 10_000})]<|tool_call_end|>"),
        ("lfm2", f"<|tool_call_start|>[add(a={'9' * 10_000})]<|tool_call_end|>"),
        ("olmo", "<function_calls>import os\nadd(a=1)</function_calls>"),
        ("olmo", "<function_calls>" + 40 * "add(</function_calls>"),
        ("gemma", "<|tool_call>call:add<tool_call|>"),
        ("gemma", "<|tool_call>add{a:1}<tool_call|>"),
        ("gemma", "<|tool_call>call:add{a:1} and<tool_call|>"),
        ("gemma", "<|tool_call>call:add{a:two}<tool_call|>"),
        ("granite", "<|tool_call|>[]"),
        ("granite", '<|tool_call|>[{"name": "add", "arguments": {}}, 5]'),
        ("granite", '<|tool_call|>[{"name": "add", "arguments": {}}'),
        ("hunyuan", "<tool_calls>add</tool_calls>"),
        ("cohere", '<|START_ACTION|>[{"name": "add", "parameters": {}}]<|END_ACTION|>'),
        ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0{}"),
    ],
)
def test_parser_returns_malformed_calls_as_text(form: str, text: str) -> None:
    assert answer_of(form, text) == (text, [])


@pytest.mark.parametrize(
    ("form", "text", "arguments", "rest"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>!', {"a": 1}, "!"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": [1}}', '{"a": [1', "}}"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {a: 1}}</tool_call>', "{a: 1}", ""),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "x', '{"a": "x', ""),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "x\\', '{"a": "x\\', ""),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}, "id": "x"}</tool_call>', {"a": 1}, ""),
        ("llama", '{"name": "add", "parameters": {"a": 1', '{"a": 1', ""),
        ("llama", '{"name": "add", "parameters": {"a": ]', '{"a": ', "]"),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1', '{"a": 1', ""),
        ("glm_lines", 'add\n{"a": 1', '{"a": 1', ""),
        (
            "deepseek",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": "<｜tool▁call',
            '{"a": "<｜tool▁call',
            "",
        ),
        ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": ]', '{"a": ', "]"),
        ("kimi", WRITERS["kimi"](("add", '{"a": 1}'))[:-43], {"a": 1}, ""),
    ],
)
def test_parser_returns_an_incomplete_call(form: str, text: str, arguments: Any, rest: str) -> None:
    """The name and the opening brace of a truncated call have been returned already."""
    expected = (rest, [("add", arguments)])
    assert answer_of(form, text) == expected
    assert answer_of(form, text, range(len(text))) == expected


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", f"<tool_call>{as_json('add', ADD)}"),
        ("llama", as_json("add", ADD, "parameters")),
        ("mistral", f"[TOOL_CALLS]add[ARGS]{json.dumps(ADD)}"),
        ("glm_lines", f"add\n{json.dumps(ADD)}"),
        ("deepseek", WRITERS["deepseek"](("add", json.dumps(ADD)))),
        ("deepseek_fenced", WRITERS["deepseek_fenced"](("add", json.dumps(ADD)))),
        ("kimi", WRITERS["kimi"](("add", json.dumps(ADD)))),
        ("harmony", WRITERS["harmony"](("add", json.dumps(ADD)))),
    ],
)
def test_arguments_are_streamed(form: str, text: str) -> None:
    parser = TOOL_FORMATS[form].create(NAMES)
    parts = [part for char in text for part in parser.add(char)]
    assert isinstance(parts[0], Call)
    assert parts[0][:2] == ("add", "{")
    assert [part.arguments for part in parts if isinstance(part, Call)] == list(json.dumps(ADD))
    assert {part.name for part in parts[1:] if isinstance(part, Call)} == {""}


def test_call_length_is_bounded() -> None:
    for name in ("add", "other"):
        text = f'<tool_call>{{"name": "{name}", "arguments": {{"a": "{"x" * MAX_CALL_CHARS}"}}}}</tool_call> and on'
        whole = answer_of("hermes", text)
        assert whole == answer_of("hermes", text, range(0, len(text), 5000))
        if name == "other":
            assert whole == (text, [])
        else:
            rest, [(_, arguments)] = whole
            begin = len("<tool_call>")
            assert (begin + len('{"name": "add", "arguments": ') + len(arguments)) == begin + MAX_CALL_CHARS + 1
            assert text.endswith(arguments[-1:] + rest)


def test_text_before_a_call_is_returned_at_once() -> None:
    parser = TOOL_FORMATS["hermes"].create(NAMES)
    assert parser.add("Let me see <tool") == ["Let me see"]
    assert parser.add("s> first.") == [" <tools> first."]
    assert parser.add(f"<tool_call>\n{as_json('get_weather', WEATHER)}\n</tool_call>") == [
        Call("get_weather", json.dumps(WEATHER))
    ]


def test_arguments_keep_escaped_lone_surrogates() -> None:
    parser = TOOL_FORMATS["hermes"].create(NAMES)
    for name in ("add", "other"):
        [call] = parser.add(f'<tool_call>{{"name": "{name}", "arguments": {{"a": "\\ud83d"}}}}</tool_call>')
        assert call == Call(name, '{"a": "\\ud83d"}')


@pytest.mark.parametrize("form", ["qwen_xml", "minimax", "deepseek_dsml"])
def test_a_name_of_the_maximum_length_may_arrive_in_pieces(form: str) -> None:
    text = WRITERS[form](("x" * 256, '{"a": 1}'))
    assert answer_of(form, text, range(len(text))) == answer_of(form, text) == ("", [("x" * 256, {"a": 1})])


@pytest.mark.parametrize("end", ["", "b", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'])
def test_parser_time_is_linear_in_white_space(end: str) -> None:
    parser = TOOL_FORMATS["hermes"].create({"f": {}})
    parts = parser.add("a")
    for _ in range(1000):
        parts += parser.add(" \n")
        assert max(map(len, parser._spaces)) == 2
    parts += parser.add(end) + parser.flush()
    content = "".join(part for part in parts if isinstance(part, str))
    assert content == ("a" if "<" in end else "a" + 1000 * " \n" + end)
