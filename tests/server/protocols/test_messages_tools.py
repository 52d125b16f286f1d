"""Tools and reasoning in Anthropic's Messages API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.server.parsing.body import IGNORED_HEADER
from support.fakes import FakeEngine, Piece, Script
from support.server_client import named_events, post
from support.tool_cases import ARGUMENTS, CALL, HERMES, prompt_of, tokenizer_with

PATH = "/v1/messages"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "get_weather", "description": "d", "input_schema": SCHEMA}
USER = {"role": "user", "content": "hello"}


def ask(
    *pieces: str,
    ends: FinishReason = FinishReason.STOP,
    template: str = HERMES,
    delimiters: dict[str, int] | None = None,
    **body: Any,
) -> tuple[Any, FakeEngine]:
    engine = FakeEngine(Script(tuple(Piece(text) for text in pieces), ends), max_body_bytes=2**16)
    engine.tokenizer = tokenizer_with(template)
    if delimiters is not None:
        engine.tokenizer.delimiter_id = delimiters.get  # type: ignore[method-assign]
    content = {"model": "demo", "max_tokens": 8, "messages": [USER], "tools": [TOOL], **body}
    return post(engine, PATH, content), engine


def test_messages_tool_call_is_a_block():
    response, engine = ask("I look.\n", CALL[:50], CALL[50:])
    answer = response.json()
    text_block, called = answer["content"]
    assert text_block == {"type": "text", "text": "I look."}
    assert called.pop("id").startswith("call_")
    assert called == {"type": "tool_use", "name": "get_weather", "input": json.loads(ARGUMENTS)}
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    function = {"name": "get_weather", "description": "d", "parameters": SCHEMA}
    assert prompt_of(engine) == ([USER], [{"type": "function", "function": function}])


def test_messages_invalid_json_arguments_are_wrapped():
    response, _ = ask(CALL[:55], ends=FinishReason.LENGTH)
    [called] = response.json()["content"]
    assert called["input"] == {"INVALID_JSON": '{"city'}
    assert response.json()["stop_reason"] == "max_tokens"


def test_messages_tool_call_stream_has_block_events():
    pieces = ["<think>Hm", "m.</think>", "I look.\n", CALL[:50], CALL[50:], CALL, ""]
    response, _ = ask(*pieces, stream=True)
    received = named_events(response)
    assert received[0][0] == "message_start"
    data = [each for _, each in received]
    opened = [(each["index"], each["content_block"]["type"]) for each in data if each["type"] == "content_block_start"]
    assert opened == [(0, "thinking"), (1, "text"), (2, "tool_use"), (3, "tool_use")]
    assert [each["index"] for each in data if each["type"] == "content_block_stop"] == [0, 1, 2, 3]
    open_blocks: list[int] = []
    for each in data:
        if each["type"] == "content_block_start":
            assert open_blocks == []
            open_blocks.append(each["index"])
        elif each["type"] == "content_block_delta":
            assert open_blocks == [each["index"]]
        elif each["type"] == "content_block_stop":
            open_blocks.remove(each["index"])
    begun = [each["content_block"] for each in data if each["type"] == "content_block_start"]
    assert begun[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert begun[2]["input"] == {}
    deltas = [(each["index"], each["delta"]) for each in data if each["type"] == "content_block_delta"]
    inputs = [delta["partial_json"] for index, delta in deltas if index == 2]
    assert len(inputs) == 2
    assert "".join(inputs) == ARGUMENTS
    assert {delta["type"] for index, delta in deltas if index >= 2} == {"input_json_delta"}
    assert "".join(delta["thinking"] for index, delta in deltas if index == 0) == "Hmm."
    assert data[-2]["delta"]["stop_reason"] == "tool_use"


def test_messages_calls_reasoning_and_results_reach_the_template():
    use = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Zurich"}}
    thought = {"type": "thinking", "thinking": "Hmm.", "signature": "s"}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "rain"}]}
    more = {"type": "tool_result", "tool_use_id": "call_2", "content": "sun", "is_error": True}
    turns = [
        USER,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [result, more, {"type": "text", "text": "and?"}]},
    ]
    response, engine = ask("Yes.", messages=turns)
    messages, _ = prompt_of(engine)
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zurich"}}}
    assert messages == [
        USER,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hmm.", "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
        {"role": "tool", "content": "sun", "tool_call_id": "call_2"},
        {"role": "user", "content": "and?"},
    ]
    assert response.headers[IGNORED_HEADER] == "messages[1].content[0].signature, messages[2].content[1].is_error" or (
        response.headers[IGNORED_HEADER] == "signature, is_error"
    )


@pytest.mark.parametrize(
    ("choice", "calls"),
    [({"type": "auto"}, 2), ({"type": "auto", "disable_parallel_tool_use": True}, 1), ({"type": "none"}, 0)],
)
def test_messages_tool_choice_limits_the_calls(choice, calls):
    response, engine = ask(CALL, CALL, tool_choice=choice)
    content = response.json()["content"]
    assert len([block for block in content if block["type"] == "tool_use"]) == calls
    assert (prompt_of(engine)[1] is None) == (calls == 0)


def test_messages_token_count_includes_tools():
    def count(**fields):
        engine = FakeEngine(max_body_bytes=2**16)
        engine.tokenizer = tokenizer_with(HERMES)
        return post(engine, f"{PATH}/count_tokens", {"messages": [USER], **fields}).json()["input_tokens"]

    assert count(tools=[TOOL]) > count() == count(tools=[TOOL], tool_choice={"type": "none"})


def test_messages_thinking_needs_no_budget():
    response, engine = ask("<think>Hmm.</think>Yes.", thinking={"type": "adaptive"})
    assert [block["type"] for block in response.json()["content"]] == ["thinking", "text"]
    assert engine.submitted[0].constraint is None


def test_messages_unsupported_tool_error_names_the_field():
    tools = [TOOL, {"name": "f", "input_schema": {"type": "x"}}]
    response, _ = ask("x", tools=tools, tool_choice={"type": "tool", "name": "f"})
    assert "`tools[1].input_schema` cannot be compiled" in response.text


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, False),
        ({"tools": None}, False),
        ({"tools": None, "messages": [USER, {"role": "assistant", "content": "I"}]}, None),
    ],
)
def test_messages_disabled_thinking_is_prevented(fields, thinks):
    _, engine = ask("Yes.", delimiters={"<think>": 0, "</think>": 1}, thinking={"type": "disabled"}, **fields)
    constraint = engine.submitted[0].constraint
    assert (None if constraint is None else "thinking[" in constraint.grammar.text) == thinks


def test_messages_disabled_thinking_without_a_parser_has_no_effect():
    _, engine = ask("Yes.", thinking={"type": "disabled"}, template="{{ messages | tojson }}", tools=None)
    assert engine.submitted[0].constraint is None


def test_messages_thinking_without_a_closing_token_is_not_disabled():
    response, engine = ask("Yes.", thinking={"type": "disabled"})
    assert (response.status_code, engine.submitted) == (400, [])
    assert response.json()["error"]["message"].startswith("`thinking.type` cannot be enforced")


def test_messages_output_format_is_enforced():
    form = {"type": "json_schema", "schema": SCHEMA}
    _, engine = ask("{}", output_config={"format": form}, tools=None)
    assert engine.submitted[0].constraint is not None
    for config, place in (
        ({"format": form | {"type": "json_object"}}, "output_config.format.type"),
        ({"format": {"type": "json_schema", "schema": {"type": "no"}}}, "output_config.format.schema"),
        ({"effort": "low"}, "output_config.effort"),
    ):
        response, refused = ask("{}", output_config=config, tools=None)
        assert response.status_code == 400
        assert f"`{place}`" in response.json()["error"]["message"]
        assert refused.submitted == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tool_choice": {"type": "tool", "name": "other"}},
            "`tool_choice.name` must be the name of one of `tools`. Given: 'other'",
        ),
        (
            {"tool_choice": {"type": "any"}, "tools": None},
            "`tool_choice.type` must be auto or none without `tools`. Given: 'any'",
        ),
    ],
)
def test_tool_choice_errors_name_the_fields_of_this_protocol(fields, message):
    refused, _ = ask("x", **fields)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, message)


def test_count_tokens_renders_the_same_prompt_as_a_message_without_thinking():
    template = HERMES + "{% if reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}<think></think>"
    body = {"messages": [USER], "thinking": {"type": "disabled"}}
    delimiters = {"<think>": 500, "</think>": 502}
    answered, engine = ask("x", template=template, delimiters=delimiters, tools=None, thinking=body["thinking"])
    assert answered.status_code == 200, answered.text
    seen: list[dict[str, Any]] = []
    render = engine.tokenizer.apply_chat_template

    def recorded(messages: Any, **given: Any) -> str:
        seen.append(given)
        return render(messages, **given)

    engine.tokenizer.apply_chat_template = recorded  # type: ignore[method-assign]
    post(engine, PATH, {"model": "demo", "max_tokens": 8, **body})
    post(engine, f"{PATH}/count_tokens", {"model": "demo", **body})
    assert seen[0] == seen[1]
    assert seen[0]["reasoning_effort"] == "low"
