"""Tool calls of Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, repeated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llm_serving.text.tool_parsers import base
from llm_serving.text.tool_parsers.json_text import object_call

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"


def _read(schemas: base.Schemas, source: base.CallSource) -> base.Reading:
    try:
        yield from object_call(source, schemas)
    except base.NotACallError:
        if not source.end:
            raise
        source.at = source.end  # the arguments are complete, the object around them is not
    yield from source.skip(CLOSING)


create: Final = base.delimited([OPENING], _read)


def rules(callees: Sequence[base.Callee], most: int | None, delimiters: base.Delimiters) -> str:
    frame = base.each_framed(OPENING, f"WS? call WS? {delimiters(CLOSING)}", most, delimiters)
    return frame + base.json_calls(callees, "arguments", delimiters)
