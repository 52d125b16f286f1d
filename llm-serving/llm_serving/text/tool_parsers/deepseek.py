"""Tool calls of DeepSeek, each between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`.

V3.1 writes the tool's name, `<｜tool▁sep｜>` and the arguments. V3 and R1 write `function<｜tool▁sep｜>`, the name, and
the arguments in a fenced code block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from llm_serving.text.structured_output.grammars import literal
from llm_serving.text.tool_parsers import headed_calls
from llm_serving.text.tool_parsers.base import Callee, Delimiters
from llm_serving.text.tool_parsers.headed_calls import HeadedLayout

OPENING: Final = "<｜tool▁calls▁begin｜>"
CLOSING: Final = "<｜tool▁calls▁end｜>"
_CALL: Final = "<｜tool▁call▁begin｜>"
_CALL_END: Final = "<｜tool▁call▁end｜>"
_NAME_END: Final = "<｜tool▁sep｜>"
_JSON: Final = "\n```json\n"
_JSON_END: Final = "\n```"
_LAYOUT: Final = HeadedLayout(
    OPENING,
    _CALL,
    re.compile(rf"\s*(?:\w+{_NAME_END})?\s*(?P<name>[\w.\-]+)\s*(?:{_NAME_END}|```json)\s*(?=\{{)"),
    ("```", _CALL_END),
    CLOSING,
)
create: Final = headed_calls.create(_LAYOUT)


def describe(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that describes tools to V3.1, whose chat template does not render tools."""
    return _describe(tools, f"{_CALL}name{_NAME_END}arguments{_CALL_END}")


def describe_fenced(tools: Sequence[Mapping[str, Any]]) -> str:
    return _describe(tools, f"{_CALL}function{_NAME_END}name{_JSON}arguments{_JSON_END}{_CALL_END}")


def _describe(tools: Sequence[Mapping[str, Any]], call: str) -> str:
    parts = ["## Tools\nYou have access to the following tools:"]
    for tool in tools:
        about = tool["function"]
        parameters = json.dumps(about.get("parameters", {}), ensure_ascii=False)
        description = f"Description: {about['description']}\n\n" if about.get("description") else ""
        parts.append(f"### {about['name']}\n{description}Parameters: {parameters}")
    parts.append(
        f"Call tools in exactly this format, with the name of a tool and its arguments as JSON that conforms to its"
        f" parameters:\n{OPENING}{call}{CLOSING}\nSeveral calls follow each other without a separator."
    )
    return "\n\n".join(parts)


def rules(callees: Sequence[Callee], most: int | None, delimiters: Delimiters) -> str:
    return headed_calls.rules(
        _LAYOUT, callees, most, delimiters, lambda name: f"{literal(name)} {delimiters(_NAME_END)}"
    )


def fenced_rules(callees: Sequence[Callee], most: int | None, delimiters: Delimiters) -> str:
    def head(name: str) -> str:
        return f'"function" {delimiters(_NAME_END)} {literal(name + _JSON)}'

    return headed_calls.rules(_LAYOUT, callees, most, delimiters, head, literal(_JSON_END))
