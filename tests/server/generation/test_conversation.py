"""Messages in the form that the chat template of a model reads."""

from __future__ import annotations

from typing import Any

import pytest
from llm_serving.server.generation.conversation import adapted_message, with_shown_calls, with_system_text

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}
AS_TEXT = CALL | {"function": {"name": "add", "arguments": '{"a": "é"}'}}
USER = {"role": "user", "content": "hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
GPT_OSS = (
    "{% if message.content and message.thinking %}{{ raise_exception() }}{% endif %}"
    "{{ message.thinking + message.tool_calls[0].function.arguments | tojson }}"
)
DEEPSEEK = "{{ '<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}"
DEEPSEEK_V3 = "{% if message['content'] is none %}{{ '```json' + '\\n' + tool['function']['arguments'] + '```' }}"


@pytest.mark.parametrize(
    ("template", "given", "expected"),
    [
        ("{{ message.content }}", {"reasoning_content": "Hm."}, {"reasoning_content": "Hm."}),
        (GPT_OSS, {"reasoning_content": "Hm."}, {"thinking": "Hm."}),
        (GPT_OSS, {"reasoning_content": "Hm.", "tool_calls": [CALL]}, {"thinking": "Hm.", "tool_calls": [CALL]}),
        (
            GPT_OSS,
            {"content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
            {"content": "", "thinking": "Hm.\n\nI look.", "tool_calls": [CALL]},
        ),
        ("{{ message['thought'] }}", {"reasoning_content": "Hm."}, {"thought": "Hm."}),
        (
            "{{ message['thinking'] }}{{ message.reasoning_content }}",
            {"reasoning_content": "Hm."},
            {"reasoning_content": "Hm."},
        ),
        (DEEPSEEK, {"tool_calls": [CALL]}, {"tool_calls": [AS_TEXT]}),
        (DEEPSEEK_V3, {"tool_calls": [CALL]}, {"content": None, "tool_calls": [AS_TEXT]}),
        (DEEPSEEK_V3, {"content": "x", "tool_calls": [CALL]}, {"content": "x", "tool_calls": [AS_TEXT]}),
        ("{{ '<a>' + tool['function']['arguments']|tojson + '</a>' }}", {"tool_calls": [CALL]}, {"tool_calls": [CALL]}),
        ("{{ call.arguments if call.arguments is string else '' }}", {"tool_calls": [CALL]}, {"tool_calls": [CALL]}),
        ("{% if m['content'] is not none %}", {"tool_calls": [CALL]}, {"tool_calls": [CALL]}),
    ],
)
def test_message_is_adapted_to_the_template(template: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    plain = {"role": "assistant", "content": ""}
    assert adapted_message(template, plain | given) == plain | expected


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([USER], [{"role": "system", "content": "T"}, USER]),
        ([SYSTEM, USER], [SYSTEM | {"content": "Be brief.\n\nT"}, USER]),
        ([SYSTEM | {"content": ""}, USER], [SYSTEM | {"content": "T"}, USER]),
    ],
)
def test_text_is_added_to_the_system_message(messages: list[Any], expected: list[Any]) -> None:
    assert with_system_text(messages, "T") == expected


@pytest.mark.parametrize(
    ("template", "content"),
    [
        ("{# <|tool_call|> #}", 'I look.<|tool_call|>[{"name": "add", "arguments": {"a": "é"}}]'),
        ("{# <|tool_list_start|> #}", 'I look.<|tool_call_start|>[add(a="é")]<|tool_call_end|>'),
        ("{# <function_calls> #}", 'I look.<function_calls>add(a="é")</function_calls>'),
        ("{# <|tool_call|> #}{{ message.tool_calls }}", "I look."),
        ("{# <tool_call> #}", "I look."),
        ("{{ message.content }}", "I look."),
    ],
)
def test_template_without_tool_calls_gets_them_as_text(template: str, content: str) -> None:
    message = {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}
    assert with_shown_calls(template, [USER, message]) == [USER, message | {"content": content}]
