"""One answer of a conversation taken apart: what was thought, what is said, which tools are called."""

from __future__ import annotations

from dataclasses import dataclass, field

from llm_serving.text.output_parsers.reasoning import ReasoningParser, Split
from llm_serving.text.tool_parsers import Call, Part, ToolParser


@dataclass(slots=True)
class AnswerParts:
    """What one piece of an answer comes to: what was thought comes before all else."""

    reasoning: str = ""
    answer: list[Part] = field(default_factory=list)
    """What is said and called, in order; nothing in it is empty."""


class AnswerParser:
    """Takes one answer apart as it comes.

    Args:
        reasoning: Finds what was thought; None: nothing is.
        tools: Finds calls in the rest; None: there are none.
        max_calls: Calls after so many are left out; None: none is.
    """

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, max_calls: int | None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._num_calls = 0

    def add(self, text: str, *, ended: bool) -> AnswerParts:
        """What has become certain by the next piece; all that is left when it is the last."""
        thought = Split(answer=text) if self._reasoning is None else self._reasoning.add(text)
        parts = AnswerParts(thought.reasoning, self._parts(thought.answer))
        if ended:
            rest = Split() if self._reasoning is None else self._reasoning.flush()
            parts.reasoning += rest.reasoning
            parts.answer += self._parts(rest.answer, ended=True)
        parts.answer = [part for part in parts.answer if (self._tells(part) if isinstance(part, Call) else part)]
        return parts

    def _tells(self, call: Call) -> bool:
        self._num_calls += bool(call.name)  # without one it goes on with the last
        return self._max_calls is None or self._num_calls <= self._max_calls

    def _parts(self, text: str, *, ended: bool = False) -> list[Part]:
        if self._tools is None:
            return [text]
        found = self._tools.add(text)
        return found + self._tools.flush() if ended else found
