"""Tool calls of DeepSeek, each between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`.

V3.1 writes the name, `<｜tool▁sep｜>` and the arguments. V3 and R1 write `function<｜tool▁sep｜>`, the name, and the
arguments as a fenced block. The parser reads both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

from llm_serving.text.structured_output.grammars import literal
from llm_serving.text.tool_parsers.base import Callee, MarkedCalls, Marks, ToolParser, any_of, framed, repeated
from llm_serving.text.tool_parsers.headed_calls import HeadedReader, Layout

OPENING: Final = "<｜tool▁calls▁begin｜>"
CLOSING: Final = "<｜tool▁calls▁end｜>"
_CALL: Final = "<｜tool▁call▁begin｜>"
_CALL_END: Final = "<｜tool▁call▁end｜>"
_NAME_END: Final = "<｜tool▁sep｜>"
_JSON: Final = "\n```json\n"
_JSON_END: Final = "\n```"
_LAYOUT: Final = Layout(
    _CALL,
    re.compile(rf"\s*(?:\w+{_NAME_END})?\s*(?P<name>[\w.\-]+)\s*(?:{_NAME_END}|```json)\s*(?=\{{)"),
    ("```", _CALL_END),
    CLOSING,
)


def create(names: Collection[str]) -> ToolParser:
    return MarkedCalls({OPENING: partial(HeadedReader, _LAYOUT, frozenset(names))})


def rules(callees: Sequence[Callee], most: int | None, marks: Marks) -> str:
    return _rules(callees, most, marks, lambda name: f"{literal(name)} {marks(_NAME_END)}", "")


def fenced_rules(callees: Sequence[Callee], most: int | None, marks: Marks) -> str:
    def head(name: str) -> str:
        return f'"function" {marks(_NAME_END)} {literal(name + _JSON)}'

    return _rules(callees, most, marks, head, literal(_JSON_END))


def _rules(callees: Sequence[Callee], most: int | None, marks: Marks, head: Callable[[str], str], tail: str) -> str:
    calls = "".join(
        f"call{i}: {marks(_CALL)} {head(each.name)} @args{i} {tail} {marks(_CALL_END)}\n"
        for i, each in enumerate(callees)
    )
    inside = f"{repeated('call', 'WS?', most)} {marks(CLOSING)}"
    return f"{framed(OPENING, inside, marks)}call: {any_of(callees)}\n{calls}"
