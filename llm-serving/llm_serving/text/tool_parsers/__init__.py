"""How models write calls of tools: one file a format, one line here."""

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
    """Makes a parser of one answer, from the tools: by name, the JSON schema of the arguments."""
    rules: Callable[[Sequence[Callee], int | None, Marks], str]
    """Makes the rules of a grammar, from the tools, the most calls (None: any number), and the marks of the model."""
    mark: str
    """What only chat templates of such models have; of several formats the first in the table counts."""
    special_tokens: bool = False
    """Whether its marks are special tokens, which answers usually leave out."""
    id_chars: int = 24
    """Letters and digits of a call's id."""
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
    """The name of the format that a chat template writes; None: none of these."""
    return next((name for name, each in TOOL_FORMATS.items() if each.mark in template), None)
