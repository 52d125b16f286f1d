"""Parses answers with tool calls, whole or in pieces, and returns their text and calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from llm_serving.text.tool_parsers import TOOL_FORMATS, Call, Part, Thought

NAMES: dict[str, dict[str, Any]] = {"get_weather": {}, "add": {}, "get": {}}
WEATHER = {"city": "Zürich, “old town”", "days": [1, 2.5, None], "deep": {"a": "}{</tool_call>[TOOL_CALLS]"}}
ADD = {"a": 17, "b": 25}


def as_json(name: str, arguments: Any, key: str = "arguments", **options: Any) -> str:
    return json.dumps({"name": name, key: arguments}, **options)


def answer_of(form: str, text: str, cuts: Sequence[int] = ()) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text and the calls with their arguments."""
    parser = TOOL_FORMATS[form].create(NAMES)
    edges = [0, *sorted(cuts), len(text)]
    parts: list[Part] = []
    for start, end in pairwise(edges):
        parts += parser.add(text[start:end])
    parts += parser.flush()
    content = "".join(part for part in parts if isinstance(part, str))
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    calls: list[Call] = []
    for part in parts:
        if isinstance(part, Call):
            calls = [*calls, part] if part.name else [*calls[:-1], Call(calls[-1].name, calls[-1].arguments + part[1])]
    return content + (thought and f" (thought: {thought})"), [(call.name, value_of(call.arguments)) for call in calls]


def value_of(arguments: str) -> Any:
    """Return the value of a JSON text, or the text itself."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
