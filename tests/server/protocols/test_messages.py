"""Anthropic's Messages API."""

from __future__ import annotations

import copy

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.errors import UnavailableError
from llm_serving.server.parsing.body import IGNORED_HEADER
from support.fakes import DEMO_TOKENIZER, FULL_QUEUE, FakeEngine, Piece, Script
from support.server_client import leave_while_held, named_events, post

PATH = "/v1/messages"
USER = {"role": "user", "content": "hello"}


def body(**fields):
    return {"model": "demo", "max_tokens": 8, "messages": [USER], **fields}


def error_of(response):
    content = response.json()
    assert set(content) == {"type", "error"}
    assert content["type"] == "error"
    assert set(content["error"]) == {"type", "message"}
    return content["error"]


def test_messages_response_has_all_fields():
    engine = FakeEngine()
    response = post(engine, PATH, body(seed=3))
    answer = response.json()
    num_prompt = len(engine.submitted[0].prompt_token_ids)
    assert answer.pop("id") == f"msg-{response.headers['x-request-id']}"
    assert response.headers["request-id"] == response.headers["x-request-id"]
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": "Hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt - 2,
            "output_tokens": 3,
            "cache_read_input_tokens": 2,
            "cache_creation_input_tokens": 0,
        },
    }
    assert (engine.submitted[0].sampling.max_tokens, engine.submitted[0].sampling.seed) == (8, 3)


def test_messages_stream_has_all_events_in_order():
    received = named_events(post(FakeEngine(), PATH, body(stream=True)))
    assert [name for name, _ in received] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert all(data["type"] == name for name, data in received)
    data = [each for _, each in received]
    assert data[0]["message"]["content"] == []
    assert data[0]["message"]["stop_reason"] is None
    assert data[1] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert [each["delta"] for each in data[2:4]] == [
        {"type": "text_delta", "text": "Hello"},
        {"type": "text_delta", "text": " world"},
    ]
    assert data[5]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert data[5]["usage"]["output_tokens"] == 3


@pytest.mark.parametrize(
    ("script", "ending"),
    [
        (Script(finish_reason=FinishReason.LENGTH), ("max_tokens", None)),
        (Script(stop_reason="###"), ("stop_sequence", "###")),
        (Script(stop_reason=7), ("end_turn", None)),
    ],
)
def test_messages_stop_reason_follows_the_finish_reason(script, ending):
    answer = post(FakeEngine(script), PATH, body(stop_sequences=["###"])).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ending


def test_messages_equal_the_chat_messages():
    turns = [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}, USER]
    ours, theirs = FakeEngine(), FakeEngine()
    post(ours, PATH, body(messages=turns, system="be kind"))
    post(theirs, "/v1/chat/completions", {"messages": [{"role": "system", "content": "be kind"}, *turns]})
    assert ours.submitted[0].prompt_token_ids == theirs.submitted[0].prompt_token_ids


def test_messages_continue_a_final_assistant_message():
    engine = FakeEngine()
    engine.tokenizer = copy.copy(DEMO_TOKENIZER)
    engine.tokenizer.apply_chat_template = lambda messages, **how: f"{messages[-1]['content']} {sorted(how.items())}"
    post(engine, PATH, body(messages=[USER, {"role": "assistant", "content": "well"}]))
    expected = "well [('add_generation_prompt', False), ('continue_final_message', True)]"
    assert engine.submitted[0].prompt_token_ids == DEMO_TOKENIZER.encode(expected, add_special_tokens=False)


def test_messages_report_a_template_that_drops_the_final_message():
    error = error_of(post(FakeEngine(), PATH, body(messages=[USER, {"role": "assistant", "content": "well"}])))
    rule = "must not end with the assistant's: because the chat template drops the last message"
    assert error["message"] == f"`messages` {rule}"


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"x": 1}}]}]}, "content[0].source"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": [{"type": "text", "text": "x", "thinking": "y"}]}, "system[0].thinking"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": ["x"] * 99}, "stop_sequences"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"tools": [{"name": "f", "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"tools": [{"name": "f g"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}, USER]}, "content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content[0].tool_use_id"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "disabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "input": {}}]}]}, "[0].input"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "thinking"}]}]}, "content[0].thinking"),
        ({"thinking": {"type": "long"}}, "thinking.type"),
        ({"stop": "x"}, "stop"),
        ({"unheard": 1}, "unheard"),
    ],
)
def test_messages_refuse_unsupported_values(fields, place):
    engine = FakeEngine()
    response = post(engine, PATH, body(**fields))
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"
    assert place in error_of(response)["message"]
    assert engine.submitted == []


def test_messages_report_ignored_fields():
    hint = {"type": "ephemeral"}
    content = [{"type": "text", "text": "x", "cache_control": hint}]
    fields = {"metadata": {"user_id": "u"}, "messages": [{"role": "user", "content": content}], "service_tier": "auto"}
    response = post(FakeEngine(), PATH, body(**fields))
    assert response.headers[IGNORED_HEADER] == "cache_control, metadata, service_tier"


@pytest.mark.parametrize(
    ("engine", "model", "status", "kind"),
    [
        (FakeEngine(refusal=FULL_QUEUE), "demo", 429, "rate_limit_error"),
        (FakeEngine(refuses_at_once=UnavailableError("loading")), "demo", 503, "overloaded_error"),
        (FakeEngine(Script(error="the WorkAgent died")), "demo", 500, "api_error"),
        (FakeEngine(), "claude", 404, "not_found_error"),
    ],
)
def test_messages_errors_have_anthropic_types(engine, model, status, kind):
    response = post(engine, PATH, body(model=model))
    assert (response.status_code, error_of(response)["type"]) == (status, kind)


def test_messages_body_too_large_has_an_anthropic_error():
    response = post(FakeEngine(), PATH, body(system="x" * 5000))
    assert (response.status_code, error_of(response)["type"]) == (413, "request_too_large")


def test_messages_stream_ends_with_an_error():
    script = Script([Piece("a"), Piece("b")], error="the WorkAgent died")
    assert named_events(post(FakeEngine(script), PATH, body(stream=True)))[-1] == (
        "error",
        {"type": "error", "error": {"type": "api_error", "message": "the WorkAgent died"}},
    )


def test_messages_disconnect_aborts_the_request():
    engine = FakeEngine(Script(hold_after=1))
    leave_while_held(engine, PATH, body(stream=True))
    assert len(engine.aborted) == 1


def test_messages_token_count_equals_the_prompt():
    fields = {"messages": [USER], "system": "be kind"}
    engine = FakeEngine()
    post(engine, PATH, body(**fields))
    counted = post(engine, f"{PATH}/count_tokens", fields).json()
    assert counted == {"input_tokens": len(engine.submitted[0].prompt_token_ids)}


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"thinking": {"type": "long"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)
def test_messages_token_count_refuses_invalid_requests(fields, place):
    assert f"`{place}`" in post(FakeEngine(), f"{PATH}/count_tokens", {"messages": [USER], **fields}).text
