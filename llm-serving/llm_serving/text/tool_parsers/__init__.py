"""Formats in which models write tool calls: one module and one table row for each format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llm_serving.core.enums import ToolFormatName
from llm_serving.text.tool_parsers import glm, glm_lines, hermes, llama, mistral
from llm_serving.text.tool_parsers.base import Call, Callee, Marks, Part, ToolParser

__all__ = ["TOOL_FORMATS", "Call", "Callee", "Marks", "Part", "ToolFormat", "ToolParser", "format_in"]


@dataclass(frozen=True)
class ToolFormat:
    create: Callable[[Mapping[str, Mapping[str, Any]]], ToolParser]
    """Creates a parser of one answer from tool name -> JSON schema of its arguments."""
    rules: Callable[[Sequence[Callee], int | None, Marks], str]
    """Returns the grammar rules of the tools. Arguments: tools, maximum number of calls (None: unlimited), marks."""
    mark: str
    """Text that occurs only in chat templates of such models. The first matching format in the table is used."""
    special_tokens: bool = False
    """Whether its marks are special tokens, which answers normally omit."""
    id_chars: int = 24
    id_prefix: str = "call_"


TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    ToolFormatName.MISTRAL: ToolFormat(
        mistral.create, mistral.rules, "[TOOL_CALLS]", special_tokens=True, id_chars=9, id_prefix=""
    ),
    ToolFormatName.GLM: ToolFormat(glm.create, glm.rules, "<arg_key>"),
    ToolFormatName.HERMES: ToolFormat(hermes.create, hermes.rules, "<tool_call>"),
    ToolFormatName.LLAMA: ToolFormat(llama.create, llama.rules, "<|python_tag|>", special_tokens=True),
    ToolFormatName.GLM_LINES: ToolFormat(glm_lines.create, glm_lines.rules, "<|observation|>"),
}


def format_in(template: str) -> str | None:
    return next((name for name, each in TOOL_FORMATS.items() if each.mark in template), None)
