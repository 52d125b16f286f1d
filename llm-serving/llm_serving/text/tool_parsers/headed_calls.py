"""Parser and grammar of calls that consist of a head with the tool's name, arguments as JSON, and closing texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from llm_serving.text.tool_parsers import base
from llm_serving.text.tool_parsers.json_text import MAX_HEAD_CHARS, headed_call, is_name


@dataclass(frozen=True, slots=True)
class HeadedLayout:
    """The delimiters of a format.

    `section`: text before all calls. `opening`: text before each call. `head`: regular expression for the text between
    `opening` and the brace of the arguments, with a group `name` and perhaps a group `id`. `tail`: texts that may
    follow the arguments, in this order. The grammar rules allow only the last of them. `end`: text after all calls,
    which some models omit.
    """

    section: str
    opening: str
    head: re.Pattern[str]
    tail: tuple[str, ...]
    end: str


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


def rules(
    layout: HeadedLayout,
    callees: Sequence[base.Callee],
    most: int | None,
    delimiters: base.Delimiters,
    head: Callable[[str], str],
    before_tail: str = "",
) -> str:
    """Return the grammar rules of up to `most` calls (see `base`). `head(name)`: term between `layout.opening` and the
    arguments. `before_tail`: term between the arguments and the last text in `layout.tail`, which ends the call.
    """
    opening, tail = delimiters(layout.opening), delimiters(layout.tail[-1])
    calls = "".join(
        f"call{i}: {opening} {head(each.name)} @args{i} {before_tail} {tail}\n" for i, each in enumerate(callees)
    )
    inside = f"{base.repeated('call', 'WS?', most)} {delimiters(layout.end)}"
    return f"{base.framed([layout.section], inside, delimiters)}call: {base.any_of(callees)}\n{calls}"
