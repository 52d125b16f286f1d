"""Tool calls of Llama 3 and 4: `{"name": ..., "parameters": {...}}`, several separated by `;`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llm_serving.text.tool_parsers import base
from llm_serving.text.tool_parsers.json_text import object_call

OPENING: Final = "<|python_tag|>"
_START, _END = "<|python_start|>", "<|python_end|>"


def _read(schemas: base.Schemas, source: base.CallSource) -> base.Reading:
    yield from source.skip(_END)
    while True:
        yield from object_call(source, schemas, only_names=True)
        yield from source.skip(_END)
        source.end = source.at
        yield from source.skip(";")
        yield from source.expect("{")


create: Final = base.delimited([OPENING, _START], _read, begins_open=True)


def rules(callees: Sequence[base.Callee], most: int | None, delimiters: base.Delimiters) -> str:
    """Return the grammar rules of calls (see `base`). Text that starts with a brace must be a call."""
    several = base.repeated("call", '";" WS?', most)
    return (
        f"calls: {several}\n"
        f"free: calls | OTHER? ({delimiters(OPENING)} calls)?\n"
        "OTHER: /[^{ \\n](?s:.*)/\n"
        f"{base.json_calls(callees, 'parameters', delimiters)}"
    )
