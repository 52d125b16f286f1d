"""Tools of chat: input of the template, calls and reasoning in responses and streams, refusals."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

import pytest
from llm_serving.core.request import FinishReason
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from support.constraint_runs import random_answer
from support.fakes import FakeEngine, Piece, Script
from support.server_client import error_of, events, post
from support.tool_cases import ARGUMENTS, CALL, HERMES, WRITERS, prompt_of, tokenizer_with

PATH = "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def hermes() -> Tokenizer:
    return tokenizer_with(HERMES)


def ask(
    tokenizer: Tokenizer, *pieces: str, limits: dict[str, Any] | None = None, **body: Any
) -> tuple[Any, FakeEngine]:
    """Return the response to a request for which the model generates these pieces."""
    script = Script(tuple(Piece(text) for text in pieces), body.pop("ends", FinishReason.STOP))
    engine = FakeEngine(script, limits=limits or {}, max_body_bytes=2**16)
    engine.tokenizer, engine.max_model_len = tokenizer, 1024
    return post(engine, PATH, {"messages": USER, "tools": [WEATHER], **body}), engine


def test_chat_response_has_tool_calls(hermes: Tokenizer) -> None:
    response, engine = ask(hermes, "I look.\n", CALL[:30], CALL[30:])
    [choice] = response.json()["choices"]
    [call] = choice["message"].pop("tool_calls")
    assert re.fullmatch(r"call_[A-Za-z0-9]{24}", call.pop("id"))
    assert call == {"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    assert choice["message"] == {"role": "assistant", "content": "I look.", "refusal": None}
    assert choice["finish_reason"] == "tool_calls"
    assert prompt_of(engine) == (USER, [WEATHER])


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [WEATHER]},
        {"messages": [*USER, {"role": "assistant", "content": "I"}], "continue_final_message": True},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": False}, "tools": [WEATHER]},
    ],
    ids=str,
)
def test_tokenize_of_messages_equals_the_prompt(hermes: Tokenizer, fields: dict[str, Any]) -> None:
    engine = FakeEngine()
    engine.tokenizer = hermes
    counted = post(engine, "/tokenize", {"messages": USER} | fields).json()
    assert post(engine, PATH, {"messages": USER, "max_tokens": 1} | fields).status_code == 200
    assert counted["tokens"] == engine.submitted[0].prompt_token_ids


def test_response_of_calls_only_has_no_content(hermes: Tokenizer) -> None:
    response, _ = ask(hermes, CALL, CALL)
    message = response.json()["choices"][0]["message"]
    assert (message["content"], len(message["tool_calls"])) == (None, 2)
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_parallel_tool_calls_false_returns_the_first_call(hermes: Tokenizer) -> None:
    response, _ = ask(hermes, CALL, CALL, parallel_tool_calls=False)
    assert len(response.json()["choices"][0]["message"]["tool_calls"]) == 1


def test_truncated_tool_call_has_finish_reason_length(hermes: Tokenizer) -> None:
    response, _ = ask(hermes, CALL, CALL[:20], ends=FinishReason.LENGTH)
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == CALL[:20]


def test_stream_has_calls_and_reasoning(hermes: Tokenizer) -> None:
    pieces = ["<thi", "nk>\nHm", "m.\n</think>", "\n\nI look.\n<tool", "_call>", CALL[11:], CALL, ""]
    response, _ = ask(hermes, *pieces, stream=True)
    *chunks, done = events(response)
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [(call["index"], call["function"]["arguments"]) for call in calls] == [(0, ARGUMENTS), (1, ARGUMENTS)]
    assert all(set(call) == {"index", "id", "type", "function"} for call in calls)
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hmm."
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "tool_calls"]


def test_stream_has_arguments_as_they_are_generated(hermes: Tokenizer) -> None:
    for parallel in (True, False):
        pieces = [CALL[:50], CALL[50:62], CALL[62:], CALL, ""]
        response, _ = ask(hermes, *pieces, stream=True, parallel_tool_calls=parallel)
        deltas = [chunk["choices"][0]["delta"] for chunk in events(response)[:-1]]
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call["index"] for call in calls] == [0, 0, 0, 1][: 4 if parallel else 3]
        assert "".join(call["function"]["arguments"] for call in calls[:3]) == ARGUMENTS
        assert [set(call) for call in calls[1:3]] == [{"index", "function"}] * 2
        assert [set(call["function"]) for call in calls[1:3]] == [{"arguments"}] * 2


def test_reasoning_is_separate_without_tools(hermes: Tokenizer) -> None:
    response, _ = ask(hermes, "<think>\nHmm.\n</think>\n\nYes.", tools=None)
    message = response.json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None, "reasoning_content": "Hmm."}


def test_chat_reasoning_opened_by_the_prompt_is_separate() -> None:
    tokenizer = tokenizer_with("{{ messages[0].content }}<think>\n")
    response, _ = ask(tokenizer, "Hmm.</think>Yes.", tools=None, limits={"reasoning_parser": "think"})
    assert response.json()["choices"][0]["message"]["reasoning_content"] == "Hmm."


def test_chat_reasoning_between_special_tokens_is_separate() -> None:
    tokenizer = tokenizer_with("{{ messages[0].content }}{# [THINK] #}")
    response, engine = ask(tokenizer, "[THI", "NK]Hmm.[/THINK]", "Yes.", tools=None)
    message = response.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hmm.", "Yes.")
    assert not engine.submitted[0].sampling.skip_special_tokens


HARMONY = "{{ messages[0].content }}{# <|channel|> {{ reasoning_effort }} #}<|start|>assistant"
ANSWER = ("<|channel|>analysis<|mess", "age|>Hmm.<|end|><|start|>assistant", "<|channel|>final<|message|>Yes.")


@pytest.mark.parametrize(
    ("limits", "tools", "reasoning", "content"),
    [
        ({}, None, "Hmm.", "Yes."),
        ({}, [WEATHER], "Hmm.", "Yes."),
        ({"tool_call_parser": "none"}, None, "Hmm.", "Yes."),
        ({"reasoning_parser": "none"}, None, None, "Hmm.\n\nYes."),
        ({"reasoning_parser": "none"}, [WEATHER], None, "Hmm.\n\nYes."),
    ],
)
def test_chat_answer_with_channels_has_reasoning_and_content(
    limits: dict[str, Any], tools: Any, reasoning: str | None, content: str
) -> None:
    response, engine = ask(tokenizer_with(HARMONY), *ANSWER, limits=limits, tools=tools)
    message = response.json()["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    assert not engine.submitted[0].sampling.skip_special_tokens


def test_chat_stream_with_channels_has_a_tool_call() -> None:
    text = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    response, _ = ask(tokenizer_with(HARMONY), *ANSWER[:2], text, ARGUMENTS[:5], ARGUMENTS[5:], "", stream=True)
    choices = [chunk["choices"][0] for chunk in events(response)[:-1]]
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert "".join(choice["delta"].get("reasoning_content", "") for choice in choices) == "Hmm."
    assert [call["function"]["arguments"] for call in calls] == [ARGUMENTS[:5], ARGUMENTS[5:]]
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_named_tool_choice_forces_a_call_with_channels() -> None:
    tokenizer = tokenizer_with(HARMONY)
    found = answers_to(tokenizer, tool_choice=CHOSEN, tools=[SWITCH])
    assert {call["function"]["name"] for calls in found for call in calls} == {"switch"}


def test_continued_chat_answer_with_channels_is_text() -> None:
    tokenizer = tokenizer_with("{{ messages[-1].content }}{# <|channel|> #}")
    messages = [*USER, {"role": "assistant", "content": "Y"}]
    response, _ = ask(tokenizer, "es.", tools=None, messages=messages, continue_final_message=True)
    assert response.json()["choices"][0]["message"]["content"] == "es."


def test_chat_template_has_the_reasoning_effort() -> None:
    tokenizer = copy.copy(tokenizer_with("{{ messages[0].content }} {{ reasoning_effort }}{# </think> #}"))
    tokenizer.delimiter_id = {"<think>": 0, "</think>": 1}.get  # type: ignore[method-assign]
    for effort, given in (("high", "high"), ("minimal", "low"), (None, "")):
        _, engine = ask(tokenizer, "x", tools=None, reasoning_effort=effort)
        assert tokenizer.decode(engine.submitted[0].prompt_token_ids).split(" ")[1:] == [given]


def test_tool_and_reasoning_parsers_can_be_disabled(hermes: Tokenizer) -> None:
    response, _ = ask(hermes, "<think>a</think>b", tools=None, limits={"reasoning_parser": "none"})
    assert response.json()["choices"][0]["message"]["content"] == "<think>a</think>b"
    response, _ = ask(hermes, CALL, limits={"tool_call_parser": "none"})
    assert error_of(response)["param"] == "tools"


def test_tool_choice_none_leaves_calls_as_text(hermes: Tokenizer) -> None:
    response, engine = ask(hermes, CALL, tool_choice="none")
    assert response.json()["choices"][0]["message"]["content"] == CALL
    assert prompt_of(engine) == (USER, None)


def test_special_token_marks_are_parsed() -> None:
    tokenizer = tokenizer_with("{{ messages[0].content }}{# [TOOL_CALLS] #}")
    response, engine = ask(tokenizer, "[TOOL_CALLS]get_weather", "{}")
    [call] = response.json()["choices"][0]["message"]["tool_calls"]
    assert re.fullmatch(r"[A-Za-z0-9]{9}", call["id"])
    assert not engine.submitted[0].sampling.skip_special_tokens


def test_calls_have_the_ids_that_the_model_writes() -> None:
    tokenizer = tokenizer_with("{{ messages[0].content }}{# <|tool_calls_section_begin|> #}")
    text = WRITERS["kimi"](("get_weather", "{}"), ("get_weather", "{}"))
    for again in ("", ":0"):
        response, _ = ask(tokenizer, text if not again else text.replace(":1", again))
        first, second = response.json()["choices"][0]["message"]["tool_calls"]
        assert first["id"] == "functions.get_weather:0"
        assert re.fullmatch(r"call_[A-Za-z0-9]{24}" if again else "functions.get_weather:1", second["id"])


@pytest.mark.parametrize(("mark", "call"), [("", "｜>name<｜tool"), ("```json", "name\n```json\narguments")])
def test_template_without_tools_gets_their_description_as_text(mark: str, call: str) -> None:
    for shows in ("", "{{ tools }}"):
        tokenizer = tokenizer_with("{{ messages | tojson }}{# <｜tool▁calls▁begin｜>" + mark + "#}" + shows)
        _, engine = ask(tokenizer, "x")
        messages, _ = json.JSONDecoder().raw_decode(tokenizer.decode(engine.submitted[0].prompt_token_ids))
        assert messages[-1:] == USER
        if not shows:
            assert messages[0]["role"] == "system"
            assert "### get_weather\n" in messages[0]["content"]
            assert json.dumps(WEATHER["function"]["parameters"]) in messages[0]["content"]
            assert call in messages[0]["content"]
        assert len(messages) == (1 if shows else 2)


def test_tool_calls_and_results_reach_the_template(hermes: Tokenizer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    _, engine = ask(hermes, "Sunny.", messages=messages)
    given, _ = prompt_of(engine)
    assert given[1]["tool_calls"] == [call | {"function": {"name": "get_weather", "arguments": {"city": "Zurich"}}}]
    assert given[2] == {"role": "tool", "content": "sunny", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    "arguments", ["{", "[]", '"x"', "{" * 2000, '{"a": "\\ud800"}', '{"\\ude00\\ud83d": 1}', '{"a": NaN}']
)
def test_tool_calls_in_messages_need_valid_arguments(hermes: Tokenizer, arguments: str) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    response, _ = ask(hermes, "x", messages=[*USER, message])
    assert error_of(response)["param"] == "messages[1].tool_calls[0].function.arguments"


def test_tool_calls_in_messages_must_be_functions(hermes: Tokenizer) -> None:
    message = {"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f", "arguments": "{}"}}]}
    error = error_of(ask(hermes, "x", messages=[*USER, message])[0])
    assert error["message"] == "`messages[1].tool_calls[0].type` must be function. Given: 'custom'"


def named(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("tool_choice", "some", "tool_choice"),
        ("tool_choice", {"type": "function", "function": {"name": "get_whether"}}, "tool_choice.function.name"),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {}}, "tool_choice"),
        ("tool_choice", named("get_weather", strict=True), "tool_choice.function.strict"),
        ("tools", [named("no spaces")], "tools[0].function.name"),
        ("tools", [named("a"), named("a")], "tools[1].function.name"),
        ("tools", [{"type": "web_search", "function": {"name": "a"}}], "tools[0].type"),
        ("tools", [named("a", strict=True, parameters={"not": {}})], "tools[0].function.parameters"),
        ("tools", [named("a"), named("b", strict=True, parameters={"$ref": "#/x"})], "tools[1].function.parameters"),
        ("tools", [named(f"f{i}") for i in range(129)], "tools"),
        ("functions", [{"name": "a"}], "functions"),
    ],
)
def test_unsupported_tool_parameters_are_refused(hermes: Tokenizer, field: str, value: Any, param: str) -> None:
    response, engine = ask(hermes, "x", **{field: value})
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert engine.submitted == []


def test_tools_without_a_parser_are_refused() -> None:
    response, _ = ask(tokenizer_with("{{ messages[0].content }}"), "x")
    assert "serving_config.tool_call_parser" in error_of(response)["message"]


def answers_to(hermes: Tokenizer, **body: Any) -> list[Any]:
    """Return the calls in random outputs for a request that requires calls."""
    _, engine = ask(hermes, "x", max_tokens=100, **body)
    constraint = engine.submitted[0].constraint
    assert constraint is not None
    found = []
    for seed in range(6):
        text = random_answer(constraint, random.Random(seed), 300)
        if text is not None:
            response, _ = ask(hermes, text, **body)
            found.append(response.json()["choices"][0]["message"].get("tool_calls"))
    return found


SWITCH = named("switch", parameters={"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
                                     "additionalProperties": False})  # fmt: skip
CHOSEN = {"type": "function", "function": {"name": "switch"}}


@pytest.mark.parametrize("choice", ["required", CHOSEN])
def test_tool_choice_required_forces_a_call(hermes: Tokenizer, choice: Any) -> None:
    found = answers_to(hermes, tool_choice=choice, tools=[SWITCH], parallel_tool_calls=False)
    assert found
    for [call] in found:
        assert call["function"]["name"] == "switch"
        assert isinstance(json.loads(call["function"]["arguments"])["on"], bool)


def test_tool_choice_forces_the_named_tool(hermes: Tokenizer) -> None:
    found = answers_to(hermes, tool_choice=CHOSEN, tools=[WEATHER, SWITCH])
    assert {call["function"]["name"] for calls in found for call in calls} == {"switch"}


def test_strict_tools_constrain_optional_calls(hermes: Tokenizer) -> None:
    strict = {**SWITCH, "function": SWITCH["function"] | {"strict": True}}
    _, engine = ask(hermes, "x", tools=[WEATHER, strict])
    assert engine.submitted[0].constraint is not None
    _, engine = ask(hermes, "x", tools=[WEATHER, SWITCH])
    assert engine.submitted[0].constraint is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": None}, "tool_choice"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"use_beam_search": True}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_tool_choice_required_refuses_incompatible_parameters(
    hermes: Tokenizer, fields: dict[str, Any], param: str
) -> None:
    response, engine = ask(hermes, "x", tool_choice="required", **fields)
    assert (response.status_code, error_of(response)["param"], engine.submitted) == (400, param, [])


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"thinking_token_budget": 7}, 7),
        ({"thinking_budget": 0}, 0),
        ({"max_thinking_tokens": 3}, 3),
        ({"reasoning_effort": "none"}, 0),
        ({"reasoning_effort": "low"}, 1024),
        ({"reasoning_effort": "high"}, 16384),
    ],
)
def test_reasoning_budget_is_enforced(hermes: Tokenizer, fields: dict[str, Any], budget: int) -> None:
    tokenizer = copy.copy(hermes)
    tokenizer.delimiter_id = {"<think>": 0, "</think>": 1}.get  # type: ignore[method-assign]
    _, engine = ask(tokenizer, "x", tools=None, limits={"reasoning_parser": "think"}, **fields)
    constraint = engine.submitted[0].constraint
    assert constraint is not None
    found = re.search(r"thinking\[max_tokens=(\d+)\]", constraint.grammar.text)
    assert (0 if found is None else int(found[1])) == budget


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_token_budget": 7}, "thinking_token_budget"),  # a model without a token that ends thoughts
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": 7, "reasoning_effort": "low"}, "reasoning_effort"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"max_thinking_tokens": 7, "min_tokens": 1}, "min_tokens"),
    ],
)
@pytest.mark.parametrize("parser", ["think", "none"])
def test_unsupported_reasoning_budgets_are_refused(
    hermes: Tokenizer, fields: dict[str, Any], param: str, parser: str
) -> None:
    response, engine = ask(hermes, "x", tools=None, limits={"reasoning_parser": parser}, **fields)
    assert (response.status_code, error_of(response)["param"], engine.submitted) == (400, param, [])


@pytest.mark.parametrize("parser", ["qwen_xml", "minimax", "gemma", "glm", "lfm2", "hermes"])
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {}}, "required": True}, "Expected array for 'required'"),
        ({"properties": {"a": {}}, "required": None}, "Expected array for 'required'"),
        ({"properties": {"a": {"type": "string"}}, "required": "a"}, "Expected array for 'required'"),
        ({"properties": {"a": {"enum": 5}}}, "enum must be an array"),
        ({"properties": {"a": {"enum": "abc"}}}, "enum must be an array"),
    ],
    ids=str,
)
def test_schema_of_a_forced_tool_whose_required_or_enum_is_no_array_is_refused(
    hermes: Tokenizer, parser: str, schema: dict[str, Any], message: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    response, _ = ask(hermes, tools=[tool], tool_choice="required", limits={"tool_call_parser": parser})
    assert response.status_code == 400
    assert error_of(response)["param"] == "tools[0].function.parameters"
    assert message in error_of(response)["message"]
