"""Tools and reasoning in OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from llm_serving.core.request import FinishReason
from llm_serving.server.app import create_app
from llm_serving.server.parsing.body import IGNORED_HEADER
from support.fakes import FakeEngine, Piece, Script
from support.server_client import error_of, events, named_events, post
from support.tool_cases import ARGUMENTS, CALL, HERMES, prompt_of, tokenizer_with

PATH = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "name": "get_weather", "description": "d", "parameters": SCHEMA}
USER = {"role": "user", "content": "hello"}


def engine_that_says(*pieces: str, ends: FinishReason = FinishReason.STOP) -> FakeEngine:
    engine = FakeEngine(Script(tuple(Piece(text) for text in pieces), ends), max_body_bytes=2**16)
    engine.tokenizer, engine.max_model_len = tokenizer_with(HERMES), 1024
    return engine


def ask(*pieces: str, ends: FinishReason = FinishReason.STOP, **body: Any) -> tuple[Any, FakeEngine]:
    engine = engine_that_says(*pieces, ends=ends)
    return post(engine, PATH, {"input": "hello", "tools": [TOOL], **body}), engine


def engine_that_thinks(*pieces: str) -> FakeEngine:
    """Return an engine whose first token opens the reasoning and whose third closes it."""
    engine = engine_that_says(*pieces)
    engine.tokenizer.delimiter_id = {"<think>": 500, "</think>": 502}.get  # type: ignore[method-assign]
    return engine


def test_reasoning_effort_is_a_reasoning_budget():
    engine = engine_that_thinks("x")
    answer = post(engine, PATH, {"input": "hello", "reasoning": {"effort": "low", "summary": "auto"}})
    assert (answer.json()["reasoning"], answer.headers[IGNORED_HEADER]) == ({"effort": "low"}, "summary")
    assert "thinking[max_tokens=1024]" in engine.submitted[0].constraint.grammar.text
    for effort in ("much", "low"):  # no such effort, and no token that ends a thought
        refused = post(engine_that_says("x"), PATH, {"input": "hello", "reasoning": {"effort": effort}})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "reasoning.effort")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_tokens_are_counted(stream):
    pieces = ("<think>", "Hm", "</think>", "Yes.")
    response = post(engine_that_thinks(*pieces), PATH, {"input": "hello", "stream": stream})
    usage = (named_events(response)[-1][1]["response"] if stream else response.json())["usage"]
    assert (usage["output_tokens"], usage["output_tokens_details"]) == (4, {"reasoning_tokens": 1})
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = {"messages": [USER], **options}
    response = post(engine_that_thinks(*pieces), "/v1/chat/completions", body)
    usage = (events(response)[-2] if stream else response.json())["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 1}


def test_tool_call_is_an_output_item():
    response, engine = ask("<think>Hmm.</think>", "I look.\n", CALL[:55], CALL[55:])
    answer = response.json()
    thought, message, called = answer["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "Hmm."}])
    assert (message["type"], message["content"][0]["text"]) == ("message", "I look.")
    assert (called["type"], called["name"], called["arguments"]) == ("function_call", "get_weather", ARGUMENTS)
    assert called["call_id"].startswith("call_")
    assert len({thought["id"], message["id"], called["id"]}) == 3
    assert {item["status"] for item in answer["output"]} == {"completed"}
    assert answer["tools"][0]["name"] == "get_weather"
    assert (answer["tool_choice"], answer["parallel_tool_calls"]) == ("auto", True)
    function = {"name": "get_weather", "description": "d", "parameters": SCHEMA}
    assert prompt_of(engine) == ([USER], [{"type": "function", "function": function}])


def test_tool_call_stream_has_item_events():
    response, _ = ask("<think>Hmm.</think>", "I look.\n", CALL[:55], CALL[55:], CALL, "", stream=True)
    received = named_events(response)
    assert [data["sequence_number"] for _, data in received] == list(range(len(received)))
    names = [name.removeprefix("response.") for name, _ in received]
    assert names == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    data = [each for _, each in received]
    places = {each["type"].removeprefix("response."): [*each][2:5] for each in data}
    assert places["output_text.delta"] == ["item_id", "output_index", "content_index"]
    assert places["function_call_arguments.delta"] == ["item_id", "output_index", "delta"]
    final = data[-1]["response"]["output"]
    assert final == [each["item"] for each in data if each["type"] == "response.output_item.done"]
    for index, item in enumerate(final):
        own = [each for each in data if each.get("output_index") == index]
        assert {each["item_id"] for each in own if "item_id" in each} == {item["id"]}
    deltas = [each["delta"] for each in data if each["type"] == "response.function_call_arguments.delta"]
    assert "".join(deltas[:2]) == deltas[2] == ARGUMENTS
    opened = next(each["item"] for each in data if each.get("item", {}).get("type") == "function_call")
    assert (opened["status"], opened["arguments"], opened["name"]) == ("in_progress", "", "get_weather")
    done = next(each for each in data if each["type"] == "response.function_call_arguments.done")
    assert (done["arguments"], done["name"]) == (ARGUMENTS, "get_weather")


def test_truncated_tool_call_is_incomplete():
    response, _ = ask(CALL, CALL[:55], ends=FinishReason.LENGTH)
    first, second = response.json()["output"]
    assert (response.json()["status"], first["status"], second["status"]) == ("incomplete", "completed", "incomplete")


def test_parallel_tool_calls_false_returns_the_first_call():
    response, _ = ask(CALL, CALL, parallel_tool_calls=False)
    assert len(response.json()["output"]) == 1
    assert response.json()["parallel_tool_calls"] is False


def test_empty_answer_is_an_empty_message():
    for stream in (False, True):
        response, _ = ask("", stream=stream)
        answer = named_events(response)[-1][1]["response"] if stream else response.json()
        assert [item["content"][0]["text"] for item in answer["output"]] == [""]


CALLED = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zurich"}}}


def test_calls_reasoning_and_outputs_reach_the_template():
    called = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": ARGUMENTS}
    items = [
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hmm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        called | {"id": "fc_1", "status": "completed"},
        called | {"call_id": "call_2"},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "sun"}]},
        called | {"call_id": "call_3"},
        {"type": "function_call_output", "call_id": "call_3", "output": "fog"},
        {"role": "assistant", "content": "Fog."},
        {"role": "assistant", "content": "Yes."},
        USER,
    ]
    response, engine = ask("Yes.", input=items)
    assert response.status_code == 200, response.text
    messages, _ = prompt_of(engine)
    calls = [CALLED | {"id": f"call_{i}"} for i in (1, 2, 3)]
    assert messages == [
        USER,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hmm.", "tool_calls": calls[:2]},
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
        {"role": "tool", "content": "sun", "tool_call_id": "call_2"},
        {"role": "assistant", "content": "", "tool_calls": calls[2:]},
        {"role": "tool", "content": "fog", "tool_call_id": "call_3"},
        {"role": "assistant", "content": "Fog."},
        {"role": "assistant", "content": "Yes."},
        USER,
    ]


def test_response_with_a_truncated_call_is_not_continued():
    engine = engine_that_says(CALL[:55], ends=FinishReason.LENGTH)

    async def talk() -> tuple[str, Any]:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            first = (await client.post(PATH, json={"input": "hello", "tools": [TOOL]})).json()["id"]
            more = {"input": "more", "tools": [TOOL], "previous_response_id": first}
            return first, (await client.post(PATH, json=more)).json()["error"]

    first, error = asyncio.run(talk())
    rule = "must be the id of a response whose tool calls have complete JSON arguments"
    assert error["message"] == f"`previous_response_id` {rule}. Given: {first!r}"


def test_tool_calls_in_the_input_need_valid_arguments():
    called = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{"}
    response, _ = ask("x", input=[{"role": "user", "content": "hello"}, called])
    assert "`input[1].arguments` must be a JSON object" in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_stored_response_is_continued(stream):
    engine = engine_that_says("<think>Hmm.</think>", "I look.", CALL)

    async def talk() -> str:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"input": "hello", "tools": [TOOL], "stream": stream}
            response = await client.post(PATH, json=body)
            first = named_events(response)[-1][1]["response"] if stream else response.json()
            call_id = first["output"][-1]["call_id"]
            output = {"type": "function_call_output", "call_id": call_id, "output": "rain"}
            goes_on = {"input": [output], "tools": [TOOL], "previous_response_id": first["id"]}
            assert (await client.post(PATH, json=goes_on)).status_code == 200
            return call_id

    call_id = asyncio.run(talk())
    messages, _ = prompt_of(engine, 1)
    called = CALLED | {"id": call_id}
    assert messages == [
        USER,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hmm.", "tool_calls": [called]},
        {"role": "tool", "content": "rain", "tool_call_id": call_id},
    ]
    assert json.loads(ARGUMENTS) == called["function"]["arguments"]


def test_response_text_format_is_enforced():
    form = {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}
    response, engine = ask("{}", tools=None, text={"format": form, "verbosity": "medium"})
    assert response.json()["text"]["format"] == form
    theirs = engine_that_says("{}")
    chat = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    post(theirs, "/v1/chat/completions", {"messages": [USER], "response_format": chat})
    assert engine.submitted[0].constraint == theirs.submitted[0].constraint is not None
    assert ask("x", text={"format": {"type": "text"}})[1].submitted[0].constraint is None


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ({"format": {"type": "json_schema", "name": "a", "schema": {"type": "no"}}}, "text.format.schema"),
        ({"format": {"type": "xml"}}, "text.format.type"),
        ({"format": "json"}, "text.format"),
        ({"verbosity": "low"}, "text.verbosity"),
        ({"format": {"type": "json_schema", "schema": SCHEMA, "more": 1}}, "text.format.more"),
    ],
)
def test_unsupported_text_format_error_names_the_field(text, param):
    response, engine = ask("x", text=text, tools=None)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert engine.submitted == []


@pytest.mark.parametrize(
    ("choice", "field", "text"),
    [
        ({"type": "function", "name": "other"}, "tool_choice.name", "one of `tools`"),
        ({"type": "function"}, "tool_choice", '{"type": "function", "name": ...}'),
        ({"type": "allowed_tools", "tools": []}, "tool_choice", '{"type": "function", "name": ...}'),
    ],
)
def test_tool_choice_errors_name_the_fields_of_this_protocol(choice, field, text):
    refused, _ = ask("x", tool_choice=choice)
    assert (refused.status_code, error_of(refused)["param"]) == (400, field)
    assert text in error_of(refused)["message"]
