"""One answer of a conversation taken apart: what was thought, what is said, which tools are called."""

from __future__ import annotations

from dataclasses import dataclass, field

from llm_serving.text.reasoning import ReasoningParser, Split
from llm_serving.text.tools import Call, Part, ToolParser


@dataclass(slots=True)
class AnswerParts:
    """What one piece of an answer comes to."""

    reasoning: str = ""
    said: str = ""
    calls: list[Call] = field(default_factory=list)


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
        parts = self._parts(thought.answer)
        parts.reasoning = thought.reasoning
        if ended:
            rest = Split() if self._reasoning is None else self._reasoning.flush()
            last = self._parts(rest.answer, ended=True)
            parts.reasoning += rest.reasoning
            parts.said += last.said
            parts.calls += last.calls
        parts.calls = [call for call in parts.calls if self._tells(call)]
        return parts

    def _tells(self, call: Call) -> bool:
        self._num_calls += bool(call.name)  # without one it goes on with the last
        return self._max_calls is None or self._num_calls <= self._max_calls

    def _parts(self, text: str, *, ended: bool = False) -> AnswerParts:
        found: list[Part] = [text]
        if self._tools is not None:
            found = self._tools.add(text)
            if ended:
                found += self._tools.flush()
        said = "".join(each for each in found if isinstance(each, str))
        return AnswerParts(said=said, calls=[each for each in found if isinstance(each, Call)])
