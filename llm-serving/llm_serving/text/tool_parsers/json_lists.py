"""Tool calls as a list of JSON objects, as Granite 3, Hunyuan, Nemotron and Cohere's Command R7B and A write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from llm_serving.text.tool_parsers import base
from llm_serving.text.tool_parsers.json_text import call_of, json_value


@dataclass(frozen=True, slots=True)
class JsonListLayout:
    """The delimiters and keys of a format.

    `openings`: texts that may precede the list; an answer that must be a call starts with the first. `closing`: text
    after the list, which some models omit. `name`, `arguments`: keys of these members of a call. `first`: grammar terms
    of the members before them.
    """

    openings: tuple[str, ...]
    closing: str = ""
    name: str = "name"
    arguments: str = "arguments"
    first: tuple[str, ...] = ()


GRANITE: Final = JsonListLayout(("<|tool_call|>", "<tool_call>"))
HUNYUAN: Final = JsonListLayout(("<tool_calls>",), "</tool_calls>")
NEMOTRON: Final = JsonListLayout(("<TOOLCALL>",), "</TOOLCALL>")
COHERE: Final = JsonListLayout(
    ("<|START_ACTION|>",),
    "<|END_ACTION|>",
    "tool_name",
    "parameters",
    first=(r'"\"tool_call_id\""', '":"', r"/\"[0-9]{1,3}\"/", '","'),
)


def _read(layout: JsonListLayout, _: base.Schemas, source: base.CallSource) -> base.Reading:
    value = yield from json_value(source)
    calls = [call_of(each, layout.name) for each in (value if isinstance(value, list) else [value])]
    if not calls:
        raise base.NotACallError
    yield from calls
    if layout.closing:
        yield from source.skip(layout.closing)


def written(layout: JsonListLayout, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    values = [{layout.name: name, layout.arguments: arguments} for name, arguments in calls]
    return layout.openings[0] + json.dumps(values, ensure_ascii=False) + layout.closing


def create(layout: JsonListLayout) -> Callable[[base.Schemas], base.ToolParser]:
    return base.delimited(layout.openings, partial(_read, layout))


def rules(layout: JsonListLayout, callees: Sequence[base.Callee], most: int | None, delimiters: base.Delimiters) -> str:
    several = base.repeated("call", 'WS? "," WS?', most)
    inside = f'WS? "[" WS? {several} WS? "]"' + (f" WS? {delimiters(layout.closing)}" if layout.closing else "")
    calls = base.json_calls(callees, layout.arguments, delimiters, name=layout.name, first=layout.first)
    return base.framed(layout.openings, inside, delimiters) + calls
