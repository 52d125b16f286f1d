"""One choice of a chat answer, as what takes its text apart finds it."""

from __future__ import annotations

from random import Random, SystemRandom
from typing import Final

from msgspec import UNSET

from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.server.schemas import (
    CalledFunction,
    ChatAnswer,
    ChatDelta,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from llm_serving.server.tools import OfferedTools
from llm_serving.text.answer_parts import AnswerParser, AnswerParts
from llm_serving.text.tools import Call

CALLED: Final = "tool_calls"
"""Why an answer ended that calls tools."""


class AnsweredMessage:
    """What one choice says.

    Args:
        parser: Takes its text apart; None: all of it is said.
        offered: The tools it may call.
        chance: Draws the ids of calls; None: nobody can draw the same.
    """

    def __init__(self, parser: AnswerParser | None, offered: OfferedTools | None, chance: Random | None = None) -> None:
        self._parser = parser
        self._chance = chance or SystemRandom()
        self._offered = offered
        self._said: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._arguments: list[list[str]] = []
        """Pieces of the arguments of each call."""

    def add(self, output: RequestOutput) -> ChatDelta | None:
        """What has become certain by a piece; None: nothing."""
        if self._parser is None:
            parts = AnswerParts(said=output.text)
        else:
            parts = self._parser.add(output.text, ended=output.finished)
        self._said.append(parts.said)
        self._reasoning.append(parts.reasoning)
        calls = [self._call(call) for call in parts.calls]
        if not (parts.said or parts.reasoning or calls):
            return None
        return ChatDelta(
            content=parts.said or UNSET, reasoning_content=parts.reasoning or UNSET, tool_calls=calls or UNSET
        )

    def whole(self, echo: str) -> ChatAnswer:
        said, reasoning = echo + "".join(self._said), "".join(self._reasoning)
        calls = self._calls
        for call, arguments in zip(calls, self._arguments, strict=True):
            call.function.arguments = "".join(arguments)
        return ChatAnswer(
            content=None if calls and not said else said,
            reasoning_content=reasoning or UNSET,
            tool_calls=calls or UNSET,
        )

    def finish_reason(self, output: RequestOutput) -> str | None:
        return CALLED if self._calls and output.finish_reason is FinishReason.STOP else output.finish_reason

    def _call(self, call: Call) -> ToolCallDelta:
        if not call.name:
            self._arguments[-1].append(call.arguments)
            return ToolCallDelta(index=len(self._calls) - 1, function=FunctionDelta(call.arguments))
        assert self._offered is not None
        begun = ToolCall(id=self._offered.new_id(self._chance), function=CalledFunction(call.name, ""))
        self._calls.append(begun)
        self._arguments.append([call.arguments])
        function = FunctionDelta(call.arguments, call.name)
        return ToolCallDelta(index=len(self._calls) - 1, id=begun.id, type=begun.type, function=function)
