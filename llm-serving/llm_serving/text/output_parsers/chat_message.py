"""Parses one chat answer into reasoning, text and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from llm_serving.text.output_parsers.reasoning import ReasoningParser, Split
from llm_serving.text.tool_parsers import Call, Part, ToolParser


@dataclass(slots=True)
class AnswerParts:
    """The parts of an answer that one piece of text completes. Reasoning comes first."""

    reasoning: str = ""
    answer: list[Part] = field(default_factory=list)
    """Text and calls in order. No part is empty."""


class AnswerParser:
    """Parses one answer incrementally. Without `reasoning` or `tools`, the answer has none. More than `max_calls` calls
    are dropped; None: unlimited.
    """

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, max_calls: int | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._num_calls = 0

    def add(self, text: str, *, ended: bool) -> AnswerParts:
        """Return the parts that this piece of text completes; if `ended`, all remaining parts."""
        split = Split(answer=text) if self._reasoning is None else self._reasoning.add(text)
        parts = AnswerParts(split.reasoning, self._parts(split.answer))
        if ended:
            rest = Split() if self._reasoning is None else self._reasoning.flush()
            parts.reasoning += rest.reasoning
            parts.answer += self._parts(rest.answer, ended=True)
        parts.answer = [
            part for part in parts.answer if (self._is_within_limit(part) if isinstance(part, Call) else part)
        ]
        return parts

    def _is_within_limit(self, call: Call) -> bool:
        self._num_calls += bool(call.name)  # without a name it continues the previous call
        return self._max_calls is None or self._num_calls <= self._max_calls

    def _parts(self, text: str, *, ended: bool = False) -> list[Part]:
        if self._tools is None:
            return [text]
        found = self._tools.add(text)
        return found + self._tools.flush() if ended else found
