"""Reasoning, text and calls keep the order of the model's text, streamed or not, for any pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.server.generation.message import MessageParser
from llm_serving.server.generation.tools import offered_tools, output_parser, reasoning_of
from llm_serving.server.protocols.openai.schemas import ChatCompletionRequest, Function, Tool
from support.fakes import FakeEngine, Piece, Script
from support.server_client import events, named_events, post
from support.tool_cases import HERMES, tokenizer_with

TOKENIZER = tokenizer_with(HERMES)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION: dict[str, Any] = {"name": "get", "parameters": SCHEMA}
Blocks = list[tuple[str, str]]
"""Kind and text of each block in order; for a call the name and the arguments."""


def call(city: str) -> str:
    return f'<tool_call>{{"name": "get", "arguments": {{"city": "{city}"}}}}</tool_call>'


def called(city: str) -> tuple[str, str]:
    return "call", f'get {{"city": "{city}"}}'


ANSWERS: dict[str, tuple[str, Blocks]] = {
    "before": (f"I look. {call('Bern')}", [("text", "I look."), called("Bern")]),
    "between": (f"{call('Bern')}and{call('Ulm')}", [called("Bern"), ("text", "and"), called("Ulm")]),
    "after": (f"{call('Bern')}that is all", [called("Bern"), ("text", "that is all")]),
    "everywhere": (
        f"<think>Hm</think>a {call('Bern')}{call('Ulm')} b<tool_call>c {call('Graz')}d <",
        [
            *(("reasoning", "Hm"), ("text", "a"), called("Bern"), called("Ulm")),
            *(("text", " b<tool_call>c"), called("Graz"), ("text", "d <")),
        ],
    ),
}


def ask(path: str, body: dict[str, Any], pieces: Sequence[str], *, stream: bool) -> httpx.Response:
    engine = FakeEngine(Script(tuple(Piece(text) for text in pieces)), max_body_bytes=2**16)
    engine.tokenizer = TOKENIZER
    response = post(engine, path, {**body, "stream": stream})
    assert response.status_code == 200, response.text
    return response


def streamed(response: httpx.Response, kinds: dict[str, str], opening: str, opened: str, place: str) -> Blocks:
    """Return the blocks of a stream: one event opens each block, and others continue the newest.

    Args:
        response: Stream of named events.
        kinds: Kind of a block in the protocol -> kind in this test.
        opening: Name of the event that opens a block.
        opened: Field of that event with the opened block.
        place: Field of the number of a block.
    """
    blocks: Blocks = []
    for event, data in named_events(response):
        if event == opening:
            assert data[place] == len(blocks)
            block = data[opened]
            blocks.append((kinds[block["type"]], f"{block['name']} " if "name" in block else ""))
        elif event.endswith("delta") and place in data:
            assert data[place] == len(blocks) - 1
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + more_of(data["delta"]))
    return blocks


def more_of(delta: str | dict[str, str]) -> str:
    """Return the addition of a delta: a text, or a field beside its type."""
    return delta if isinstance(delta, str) else next(text for name, text in delta.items() if name != "type")


def messages(pieces: Sequence[str], *, stream: bool) -> Blocks:
    user = {"role": "user", "content": "hello"}
    tool = {"name": "get", "input_schema": SCHEMA}
    body = {"model": "demo", "max_tokens": 8, "messages": [user], "tools": [tool]}
    response = ask("/v1/messages", body, pieces, stream=stream)
    kinds = {"thinking": "reasoning", "text": "text", "tool_use": "call"}
    if not stream:
        content = response.json()["content"]
        own = {"thinking": "thinking", "text": "text", "tool_use": "input"}
        texts = [each[own[each["type"]]] for each in content]
        return [
            (kinds[each["type"]], text if isinstance(text, str) else f"{each['name']} {json.dumps(text)}")
            for each, text in zip(content, texts, strict=True)
        ]
    return streamed(response, kinds, "content_block_start", "content_block", "index")


def responses(pieces: Sequence[str], *, stream: bool) -> Blocks:
    body = {"input": "hello", "tools": [{"type": "function", **FUNCTION}]}
    response = ask("/v1/responses", body, pieces, stream=stream)
    kinds = {"reasoning": "reasoning", "message": "text", "function_call": "call"}
    if not stream:
        return [
            (kinds[item["type"]], item["content"][0]["text"])
            if "content" in item
            else (kinds[item["type"]], f"{item['name']} {item['arguments']}")
            for item in response.json()["output"]
        ]
    return streamed(response, kinds, "response.output_item.added", "item", "output_index")


def chat(pieces: Sequence[str], *, stream: bool) -> Blocks:
    """Return all reasoning, then all text, then the calls: this protocol has a field for each."""
    user = {"role": "user", "content": "hello"}
    body = {"messages": [user], "tools": [{"type": "function", "function": FUNCTION}]}
    response = ask("/v1/chat/completions", body, pieces, stream=stream)
    if stream:
        received = [each["choices"][0]["delta"] for each in events(response)[:-1]]
    else:
        received = [response.json()["choices"][0]["message"]]
    names = {"reasoning": "reasoning_content", "text": "content"}
    texts = {kind: "".join(each.get(name) or "" for each in received) for kind, name in names.items()}
    calls: Blocks = []
    for function in (each["function"] for delta in received for each in delta.get("tool_calls", ())):
        if "name" in function:
            calls.append(("call", f"{function['name']} "))
        calls[-1] = ("call", calls[-1][1] + function["arguments"])
    return [*((kind, text) for kind, text in texts.items() if text), *calls]


def of_fields(blocks: Blocks) -> Blocks:
    joined = [(kind, "".join(text for each, text in blocks if each == kind)) for kind in ("reasoning", "text")]
    return [*((kind, text) for kind, text in joined if text), *(each for each in blocks if each[0] == "call")]


def folded(pieces: Sequence[str]) -> tuple[Blocks, Blocks]:
    """Return the blocks as they were streamed, and as the final response has them."""
    engine = FakeEngine()
    engine.tokenizer = TOKENIZER
    request = ChatCompletionRequest(messages=[], tools=[Tool(Function(**FUNCTION))])
    offered = offered_tools(engine, request)
    parser = MessageParser(output_parser(request, reasoning_of(engine, request, []), offered), offered)
    received: Blocks = []
    for number, text in enumerate(pieces, 1):
        reason = FinishReason.STOP if number == len(pieces) else None
        for block, begins, more in parser.fold(RequestOutput("id", text, (), (), 1, 0, number, reason)):
            if begins:
                received.append((block.kind, f"{block.name} " if block.name else ""))
            assert block.index == len(received) - 1, "only the last block goes on"
            received[-1] = (received[-1][0], received[-1][1] + more)
    return received, [(each.kind, f"{each.name} {each.text}".removeprefix(" ")) for each in parser.blocks]


@pytest.mark.parametrize("name", ANSWERS)
def test_response_blocks_keep_the_order_of_the_text(name: str) -> None:
    text, expected = ANSWERS[name]
    cuts = [[text[:at], text[at:]] for at in range(len(text) + 1)]
    for pieces in ([text], list(text), *cuts):
        assert folded(pieces) == (expected, expected), pieces


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("route", [messages, responses, chat])
def test_stream_has_the_order_of_the_whole_response(route: Any, name: str) -> None:
    text, blocks = ANSWERS[name]
    expected = of_fields(blocks) if route is chat else blocks
    assert route([text], stream=False) == expected
    assert route([text], stream=True) == expected
    assert route(list(text), stream=True) == expected
