"""Requests that users send to a real model: chats, conversations, tools, schemas, long prompts and several choices."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import httpx
from acceptance.device.outcome import Outcome, PartError, table
from acceptance.device.server import Server
from support.schemas import fault_of, random_schema

QUESTIONS: Final = (
    "Write a Python function that reverses a linked list.",
    "用中文解释什么是递归。",
    "What is the capital of France? Answer in one sentence.",
)
TURNS: Final = 20
LONG_TOKENS: Final = 8000
NUM_SCHEMAS: Final = 30
TIMEOUT_S: Final = 1800.0
WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the current weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["city"],
        },
    },
}


def post(server: Server, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON answer to a request.

    Raises:
        PartError: The server refuses the request.
    """
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=TIMEOUT_S)
    if answer.status_code != 200:
        raise PartError(f"{path} answers {answer.status_code}: {answer.text[:300]}")
    found: dict[str, Any] = answer.json()
    return found


def chat(server: Server, messages: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """Return the first choice of a greedy chat completion."""
    body = {"messages": list(messages), "temperature": 0, "max_tokens": 96, **more}
    choice: dict[str, Any] = post(server, "/v1/chat/completions", body)["choices"][0]
    return choice


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def complete(server: Server, prompt: str, **more: Any) -> str:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 64, **more}
    text: str = post(server, "/v1/completions", body)["choices"][0]["text"]
    return text


def texts(server: Server, speaks: bool) -> Outcome:
    """Ask a few questions; a person reads the answers in the report."""
    asked = QUESTIONS if speaks else ("The capital of France is", "def fibonacci(n):\n", "中国的首都是")
    lines = []
    for text in asked:
        answer = chat(server, user(text))["message"]["content"] if speaks else complete(server, text)
        lines += [f"**{text.strip()}**", "", "```text", *answer.strip().splitlines(), "```", ""]
    return Outcome("Answers to read", lines)


def conversation(server: Server) -> Outcome:
    """Hold a multi-turn conversation. Without cached prefixes, the last answer must be the same."""
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        messages += user(f"Turn {turn + 1}: name one more animal and say in one sentence where it lives.")
        choice = chat(server, messages, max_tokens=40)
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
    again = chat(server, messages[:-1], max_tokens=40, cache_salt="of its own")["message"]["content"]
    faults = [] if again == messages[-1]["content"] else [f"cached: {messages[-1]['content']}; not cached: {again}"]
    return Outcome(f"A conversation of {TURNS} turns", [f"The last answer: {again}"], faults)


def long_prompt(server: Server) -> Outcome:
    """Send a prompt of 8,000 tokens twice. The second time its prefix is cached, and the answer must be the same."""
    words = " ".join(f"Line {number}: the value is {number * 7 % 101}." for number in range(2000))
    ids = post(server, "/tokenize", {"prompt": words})["tokens"][:LONG_TOKENS]
    answers, seconds = [], []
    for _ in range(2):
        begun = time.monotonic()
        answers.append(complete(server, ids, max_tokens=32))  # type: ignore[arg-type]
        seconds.append(time.monotonic() - begun)
    faults = [] if answers[0] == answers[1] else [f"first {answers[0]!r}, then {answers[1]!r}"]
    line = f"{len(ids):,} tokens: {seconds[0]:.1f} s, with the prefix cached {seconds[1]:.1f} s. Answer: {answers[0]!r}"
    return Outcome("A long prompt", [line], faults)


def choices(server: Server) -> Outcome:
    """Ask for four sampled choices twice with one seed."""
    body = {"prompt": "Once upon a time", "n": 4, "seed": 7, "temperature": 0.8, "max_tokens": 32}
    first, second = ([each["text"] for each in post(server, "/v1/completions", body)["choices"]] for _ in range(2))
    faults = [] if first == second else ["the same seed gives other choices"]
    faults += [] if len(set(first)) > 1 else ["all choices are equal"]
    return Outcome("Four choices", [f"- {text!r}" for text in first], faults)


def schemas(server: Server) -> Outcome:
    """Ask for JSON with random schemas. Every complete answer must match its schema."""
    rows, faults = [], []
    for seed in range(NUM_SCHEMAS):
        schema = random_schema(seed)
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        choice = chat(server, user("Invent an example."), max_tokens=200, response_format=form)
        fault = fault_of(schema, choice["message"]["content"]) if choice["finish_reason"] == "stop" else None
        if fault is not None:
            faults.append(f"schema {seed} {json.dumps(schema)[:120]}: {fault}")
        rows.append(choice["finish_reason"])
    counts = {reason: rows.count(reason) for reason in sorted(set(rows))}
    return Outcome(f"{NUM_SCHEMAS} schemas", [", ".join(f"{count} {name}" for name, count in counts.items())], faults)


def tools(server: Server) -> Outcome:
    """Ask a question that needs a tool, with `tool_choice` as `auto`, as `required`, and as the name of the tool."""
    rows, faults = [], []
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("auto", "required", named):
        question = user("What is the weather in Paris now? Use the tool.")
        found = chat(server, question, tools=[WEATHER], tool_choice=choice, max_tokens=128)
        calls = found["message"].get("tool_calls") or []
        label = choice if isinstance(choice, str) else "named"
        arguments = [each["function"]["arguments"] for each in calls]
        rows.append((label, found["finish_reason"], "; ".join(arguments) or repr(found["message"]["content"])[:80]))
        if label != "auto" and not calls:
            faults.append(f"tool_choice {label}: no call")
        for text in arguments:
            if fault := fault_of(WEATHER["function"]["parameters"], text):  # type: ignore[index]
                faults.append(f"tool_choice {label}: {fault}")
    return Outcome("Tools", table(("tool_choice", "finish_reason", "arguments or text"), rows), faults)
