"""Tool calls of Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` or `[TOOL_CALLS]name[ARGS]{...}`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from llm_serving.text.structured_output.grammars import literal
from llm_serving.text.tool_parsers import base
from llm_serving.text.tool_parsers.json_text import MAX_HEAD_CHARS, call_of, headed_call, is_name, json_value

OPENING: Final = "[TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"
_NAME: Final = re.compile(r"([\w.\-]+)(?:\[CALL_ID\][A-Za-z0-9]*)?(?:\[ARGS\])?\s*(?=\{)")


def _read(schemas: base.Schemas, source: base.CallSource) -> base.Reading:
    while (head := _head(source.body)) is None:
        yield None
    name, source.at = head
    if name is not None:
        yield from headed_call(source, name, schemas)
        return
    value = yield from json_value(source)
    if not isinstance(value, list) or not value:
        raise base.NotACallError
    yield from [call_of(each) for each in value]


def _head(body: str) -> tuple[str | None, int] | None:
    """Return the name before the JSON (None before a list) and the JSON's index, or None if more text is needed."""
    stripped = body.lstrip()
    start = len(body) - len(stripped)
    if not stripped:
        return None
    if stripped[0] == "[":
        return None, start
    head = stripped[: MAX_HEAD_CHARS + 1]
    found = _NAME.match(head)
    if found is not None and is_name(found[1]):
        return found[1], start + found.end()
    if found is not None or "{" in head or not re.match(r"[\w.\-]", head) or len(head) > MAX_HEAD_CHARS:
        raise base.NotACallError
    return None


create: Final = base.delimited([OPENING], _read)


def rules(callees: Sequence[base.Callee], most: int | None, delimiters: base.Delimiters) -> str:
    if not delimiters.are_special(ARGUMENTS):
        several = base.repeated("call", 'WS? "," WS?', most)
        calls = base.json_calls(callees, "arguments", delimiters)
        return base.framed([OPENING], f'WS? "[" WS? {several} WS? "]"', delimiters) + calls

    def call(index: int, callee: base.Callee) -> str:
        return f"call{index}: {literal(callee.name)} {delimiters(ARGUMENTS)} @args{index}\n"

    several = base.repeated("call", delimiters(OPENING), most)
    return base.framed([OPENING], several, delimiters) + base.any_call(callees, call)
