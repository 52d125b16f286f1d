"""Formats in which models write their reasoning before an answer. Each format is one row of a table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from llm_serving.core.enums import ReasoningFormatName


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Delimiters of a format.

    Attributes:
        template_pattern: Regular expression that matches only chat templates of such models. The first matching format
            in the table is used.
        opening: Delimiter before the reasoning.
        closing: Delimiter after the reasoning.
        answer: Delimiters before and after the answer, which models may omit; empty texts: no delimiters.
        opening_suffix: Text after the opening delimiter in prompts that ask for no reasoning.
        special_tokens: Whether the delimiters are special tokens, which detokenization normally skips.
        has_channels: Whether each part of an answer has a header with its channel (gpt-oss), so that reasoning may
            also follow calls or text.
    """

    template_pattern: str
    opening: str = "<think>"
    closing: str = "</think>"
    answer: tuple[str, str] = ("", "")
    opening_suffix: str = ""
    special_tokens: bool = False
    has_channels: bool = False

    def is_open(self, prompt: str) -> bool:
        """Return whether the prompt ends with the start of reasoning."""
        return prompt.rstrip().removesuffix(self.opening_suffix).endswith(self.opening)


THINK: Final = ReasoningFormat("</?think>")
REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    ReasoningFormatName.HARMONY: ReasoningFormat(
        r"<\|channel\|>",
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant",
        ("<|channel|>final<|message|>", ""),
        special_tokens=True,
        has_channels=True,
    ),
    ReasoningFormatName.SEED: ReasoningFormat(
        "<seed:think>",
        "<seed:think>",
        "</seed:think>",
        opening_suffix="<seed:cot_budget_reflect>",
        special_tokens=True,
    ),
    ReasoningFormatName.COHERE: ReasoningFormat(
        r"<\|START_THINKING\|>",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        special_tokens=True,
    ),
    ReasoningFormatName.MISTRAL: ReasoningFormat(r"\[THINK\]", "[THINK]", "[/THINK]", special_tokens=True),
    ReasoningFormatName.GRANITE: ReasoningFormat(
        "Here is my thought process:", "Here is my thought process:", "Here is my response:"
    ),
    ReasoningFormatName.GEMMA: ReasoningFormat(r"<\|channel>", "<|channel>thought", "<channel|>", special_tokens=True),
    ReasoningFormatName.THINK_RESPONSE: ReasoningFormat(
        r"<response>(?:\\n|\n|</response>)", answer=("<response>", "</response>")
    ),
    ReasoningFormatName.THINK_ANSWER: ReasoningFormat(
        "(?s)<think>.*<answer>|<answer>.*<think>", answer=("<answer>", "</answer>")
    ),
    ReasoningFormatName.THINK: THINK,
}


@lru_cache(maxsize=16)
def reasoning_format_in(template: str) -> ReasoningFormat | None:
    return next((each for each in REASONING_FORMATS.values() if re.search(each.template_pattern, template)), None)
