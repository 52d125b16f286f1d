"""Tool calls of Kimi-K2: `<|tool_calls_section_begin|>`, then `functions.name:0` and the arguments of each call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from llm_serving.text.structured_output.grammars import literal
from llm_serving.text.tool_parsers import headed_calls
from llm_serving.text.tool_parsers.base import Callee, Delimiters
from llm_serving.text.tool_parsers.headed_calls import HeadedLayout

OPENING: Final = "<|tool_calls_section_begin|>"
CLOSING: Final = "<|tool_calls_section_end|>"
_CALL: Final = "<|tool_call_begin|>"
_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
_CALL_END: Final = "<|tool_call_end|>"
_LAYOUT: Final = HeadedLayout(
    OPENING,
    _CALL,
    re.compile(rf"\s*(?P<id>(?:functions\.)?(?P<name>[\w.\-]+)(?::\d{{1,9}})?)\s*{re.escape(_ARGUMENTS)}\s*(?=\{{)"),
    (_CALL_END,),
    CLOSING,
)


create: Final = headed_calls.create(_LAYOUT)
"""The parser keeps the model's ids of calls, because the chat template writes them into later prompts."""


def rules(callees: Sequence[Callee], most: int | None, delimiters: Delimiters) -> str:
    def head(name: str) -> str:
        return f"{literal(f'functions.{name}:')} NUMBER {delimiters(_ARGUMENTS)}"

    return f"{headed_calls.rules(_LAYOUT, callees, most, delimiters, head)}NUMBER: /[0-9]{{1,4}}/\n"
