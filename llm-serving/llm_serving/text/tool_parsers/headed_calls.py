"""Tool calls that consist of a head with the tool's name, and of arguments as JSON, as Kimi-K2 and DeepSeek write them.

DeepSeek-V3.1 writes the tool's name, `<｜tool▁sep｜>` and the arguments. V3 and R1 write `function<｜tool▁sep｜>`, the
name, and the arguments in a fenced code block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from llm_serving.text.structured_output.grammars import literal
from llm_serving.text.tool_parsers import base
from llm_serving.text.tool_parsers.json_text import MAX_HEAD_CHARS, headed_call, is_name


@dataclass(frozen=True, slots=True)
class HeadedLayout:
    """The delimiters of a format.

    `section`: text before all calls. `opening`: text before each call. `head`: regular expression for the text between
    `opening` and the brace of the arguments, with a group `name` and perhaps a group `id`. `tail`: texts that may
    follow the arguments, in this order. The grammar rules allow only the last of them. `end`: text after all calls,
    which some models omit. `head_term(name, delimiters)`: grammar term of the head. `before_tail`: grammar term between
    the arguments and the tail. `example`: a call between `opening` and the tail, for descriptions of tools.
    """

    section: str
    opening: str
    head: re.Pattern[str]
    tail: tuple[str, ...]
    end: str
    head_term: Callable[[str, base.Delimiters], str]
    before_tail: str = ""
    example: str = ""


_KIMI_HEAD_END: Final = "<|tool_call_argument_begin|>"
KIMI: Final = HeadedLayout(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    # The chat template writes the model's ids of calls into later prompts.
    re.compile(
        rf"\s*(?P<id>(?:functions\.)?(?P<name>[\w.\-]+)(?::\d{{1,9}})?)\s*{re.escape(_KIMI_HEAD_END)}\s*(?=\{{)"
    ),
    ("<|tool_call_end|>",),
    "<|tool_calls_section_end|>",
    lambda name, delimiters: f"{literal(f'functions.{name}:')} /[0-9]{{1,4}}/ {delimiters(_KIMI_HEAD_END)}",
)
_NAME_END: Final = "<｜tool▁sep｜>"
DEEPSEEK: Final = HeadedLayout(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    re.compile(rf"\s*(?:\w+{_NAME_END})?\s*(?P<name>[\w.\-]+)\s*(?:{_NAME_END}|```json)\s*(?=\{{)"),
    ("```", "<｜tool▁call▁end｜>"),
    "<｜tool▁calls▁end｜>",
    lambda name, delimiters: f"{literal(name)} {delimiters(_NAME_END)}",
    example=f"name{_NAME_END}arguments",
)
DEEPSEEK_FENCED: Final = replace(
    DEEPSEEK,
    head_term=lambda name, delimiters: f'"function" {delimiters(_NAME_END)} ' + literal(name + "\n```json\n"),
    before_tail=literal("\n```"),
    example=f"function{_NAME_END}name\n```json\narguments\n```",
)


def _read(layout: HeadedLayout, schemas: base.Schemas, source: base.CallSource) -> base.Reading:
    while (yield from source.take(layout.opening, layout.end)) == layout.opening:
        start = source.at
        while (head := layout.head.match(source.body, start, start + MAX_HEAD_CHARS)) is None:
            text = source.body[start : start + MAX_HEAD_CHARS + 1]
            if "{" in text or len(text) > MAX_HEAD_CHARS:
                raise base.NotACallError
            yield None
        if not is_name(head["name"]):
            raise base.NotACallError
        source.at = head.end()
        yield from headed_call(source, head["name"], schemas, head.groupdict().get("id") or "")
        for delimiter in layout.tail:
            yield from source.skip(delimiter)
        source.end = source.at
    if not source.end:
        raise base.NotACallError


def create(layout: HeadedLayout) -> Callable[[base.Schemas], base.ToolParser]:
    return base.delimited([layout.section], partial(_read, layout))


def rules(layout: HeadedLayout, callees: Sequence[base.Callee], most: int | None, delimiters: base.Delimiters) -> str:
    opening, tail = delimiters(layout.opening), f"{layout.before_tail} {delimiters(layout.tail[-1])}"

    def call(index: int, callee: base.Callee) -> str:
        return f"call{index}: {opening} {layout.head_term(callee.name, delimiters)} @args{index} {tail}\n"

    inside = f"{base.repeated('call', 'WS?', most)} {delimiters(layout.end)}"
    return base.framed([layout.section], inside, delimiters) + base.any_call(callees, call)


def describe(layout: HeadedLayout, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that describes tools to DeepSeek-V3, whose chat template does not render tools."""
    parts = ["## Tools\nYou have access to the following tools:"]
    for tool in tools:
        about = tool["function"]
        parameters = json.dumps(about.get("parameters", {}), ensure_ascii=False)
        description = f"Description: {about['description']}\n\n" if about.get("description") else ""
        parts.append(f"### {about['name']}\n{description}Parameters: {parameters}")
    parts.append(
        f"Call tools in exactly this format, with the name of a tool and its arguments as JSON that conforms to its"
        f" parameters:\n{layout.section}{layout.opening}{layout.example}{layout.tail[-1]}{layout.end}\nSeveral calls"
        " follow each other without a separator."
    )
    return "\n\n".join(parts)
