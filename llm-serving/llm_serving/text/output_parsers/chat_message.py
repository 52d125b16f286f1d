"""Parses one chat answer into reasoning, text and tool calls."""

from __future__ import annotations

from llm_serving.text.output_parsers.reasoning import ReasoningParser, Split
from llm_serving.text.tool_parsers import Call, Part, Thought, ToolParser


class AnswerParser:
    """Parses one answer incrementally.

    Args:
        reasoning: None: the answer has no reasoning.
        tools: None: the answer has no calls.
        max_calls: Further calls are dropped; None: unlimited.
    """

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, max_calls: int | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._num_calls = 0

    def add(self, text: str, *, ended: bool) -> list[Part]:
        """Return the non-empty parts, in order, that this text completes; with `ended`, all remaining parts."""
        parts = self._parts(Split(answer=text) if self._reasoning is None else self._reasoning.add(text))
        if ended:
            parts += self._parts(Split() if self._reasoning is None else self._reasoning.flush())
            parts += [] if self._tools is None else self._tools.flush()
        return [part for part in parts if (self._is_within_limit(part) if isinstance(part, Call) else part)]

    def _is_within_limit(self, call: Call) -> bool:
        self._num_calls += bool(call.name)  # without a name it continues the previous call
        return self._max_calls is None or self._num_calls <= self._max_calls

    def _parts(self, split: Split) -> list[Part]:
        thoughts: list[Part] = [Thought(split.reasoning)] if split.reasoning else []
        return thoughts + ([split.answer] if self._tools is None else self._tools.add(split.answer))
