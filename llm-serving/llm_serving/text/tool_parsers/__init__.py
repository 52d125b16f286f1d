"""Formats in which models write tool calls. Each format is one row of `TOOL_FORMATS`. Similar ones share a module."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

from llm_serving.core.enums import ToolFormatName
from llm_serving.text.tool_parsers import (
    gemma,
    glm,
    glm_lines,
    harmony,
    headed_calls,
    hermes,
    json_lists,
    llama,
    mistral,
    pythonic,
    xml_calls,
)
from llm_serving.text.tool_parsers.base import Call, Callee, Delimiters, Part, Schemas, Thought, ToolParser

__all__ = ["TOOL_FORMATS", "Call", "Callee", "Delimiters", "Part", "Thought", "ToolFormat", "ToolParser", "format_in"]


@dataclass(frozen=True)
class ToolFormat:
    create: Callable[[Schemas], ToolParser]
    """Creates a parser of one answer."""
    rules: Callable[[Sequence[Callee], int | None, Delimiters], str]
    """Returns the grammar rules of calls. Arguments: tools, maximum number of calls or None, delimiter terms."""
    template_pattern: str
    """Regular expression for chat templates of this format. The first match in `TOOL_FORMATS` is used."""
    special_tokens: bool = False
    """Whether the format's delimiters are special tokens, which detokenization normally skips."""
    id_chars: int = 24
    id_prefix: str = "call_"
    describe_tools: Callable[[Sequence[Mapping[str, Any]]], str] | None = None
    """Returns a system text that describes the tools, for chat templates that do not render tools, or None."""
    written: Callable[[Sequence[tuple[str, dict[str, Any]]]], str] | None = None
    """Returns calls (name, arguments) in the model's syntax, for chat templates that do not render calls."""


def _xml(layout: xml_calls.XmlLayout, template_pattern: str) -> ToolFormat:
    rules = partial(xml_calls.rules, layout)
    return ToolFormat(xml_calls.create(layout), rules, template_pattern, special_tokens=layout is not xml_calls.QWEN)


def _headed(layout: headed_calls.HeadedLayout, template_pattern: str) -> ToolFormat:
    create, rules = headed_calls.create(layout), partial(headed_calls.rules, layout)
    describe_tools = partial(headed_calls.describe, layout) if layout.example else None
    return ToolFormat(create, rules, template_pattern, special_tokens=True, describe_tools=describe_tools)


def _json(layout: json_lists.JsonListLayout, template_pattern: str, *, special_tokens: bool = False) -> ToolFormat:
    rules, written = partial(json_lists.rules, layout), partial(json_lists.written, layout)
    return ToolFormat(json_lists.create(layout), rules, template_pattern, special_tokens, written=written)


def _python(layout: pythonic.PythonicLayout, template_pattern: str) -> ToolFormat:
    rules, written = partial(pythonic.rules, layout), partial(pythonic.written, layout)
    return ToolFormat(pythonic.create(layout), rules, template_pattern, layout is pythonic.LFM2, written=written)


TOOL_FORMATS: Final[Mapping[str, ToolFormat]] = {
    ToolFormatName.HARMONY: ToolFormat(harmony.HarmonyParser, harmony.rules, r"<\|channel\|>", special_tokens=True),
    ToolFormatName.KIMI: _headed(headed_calls.KIMI, r"<\|tool_calls_section_begin\|>"),
    ToolFormatName.DEEPSEEK_FENCED: _headed(headed_calls.DEEPSEEK_FENCED, "(?s)<｜tool▁calls▁begin｜>.*```json"),
    ToolFormatName.DEEPSEEK: _headed(headed_calls.DEEPSEEK, "<｜tool▁calls▁begin｜>"),
    ToolFormatName.DEEPSEEK_DSML: _xml(xml_calls.DSML, "(?s)｜DSML｜.*function_calls"),
    ToolFormatName.MISTRAL: ToolFormat(
        mistral.create, mistral.rules, r"\[TOOL_CALLS\]", special_tokens=True, id_chars=9, id_prefix=""
    ),
    ToolFormatName.MINIMAX: _xml(xml_calls.MINIMAX, "<minimax:tool_call>"),
    ToolFormatName.SEED: _xml(xml_calls.SEED, "<seed:tool_call>"),
    ToolFormatName.QWEN_XML: _xml(xml_calls.QWEN, "<function="),
    ToolFormatName.COHERE: _json(json_lists.COHERE, r"<\|START_ACTION\|>", special_tokens=True),
    ToolFormatName.GRANITE: _json(json_lists.GRANITE, r"<\|tool_call\|>", special_tokens=True),
    ToolFormatName.GEMMA: ToolFormat(gemma.create, gemma.rules, r"<\|tool_call>", special_tokens=True),
    ToolFormatName.HUNYUAN: _json(json_lists.HUNYUAN, "<tool_calls>"),
    ToolFormatName.NEMOTRON: _json(json_lists.NEMOTRON, "<TOOLCALL>", special_tokens=True),
    ToolFormatName.MINICPM: _python(pythonic.MINICPM, r"<\|tool_call_start\|>(?:\\n|\n)```python"),
    ToolFormatName.LFM2: _python(pythonic.LFM2, r"<\|tool_(?:call|list)_start\|>"),
    ToolFormatName.OLMO: _python(pythonic.OLMO, "<function_calls>"),
    ToolFormatName.GLM: ToolFormat(glm.create, glm.rules, "<arg_key>"),
    ToolFormatName.HERMES: ToolFormat(hermes.create, hermes.rules, "<tool_call>"),
    ToolFormatName.LLAMA: ToolFormat(llama.create, llama.rules, r"<\|python_(?:tag|start)\|>", special_tokens=True),
    ToolFormatName.GLM_LINES: ToolFormat(glm_lines.create, glm_lines.rules, r"<\|observation\|>"),
}


@lru_cache(maxsize=16)
def format_in(template: str) -> str | None:
    return next((name for name, each in TOOL_FORMATS.items() if re.search(each.template_pattern, template)), None)
