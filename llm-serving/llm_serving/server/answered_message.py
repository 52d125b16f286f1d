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
from llm_serving.server.thinking import ThoughtCounter
from llm_serving.server.tools import OfferedTools
from llm_serving.text.output_parsers.chat_message import AnswerParser, AnswerParts
from llm_serving.text.tool_parsers import Call

CALLED: Final = "tool_calls"
"""Why an answer ended that calls tools."""


class AnsweredMessage:
    """What one choice says.

    Args:
        parser: Takes its text apart; None: all of it is said.
        offered: The tools it may call.
        chance: Draws the ids of calls; None: nobody can draw the same.
        thoughts: Counts the tokens of what is thought; None: nobody can.
    """

    def __init__(
        self,
        parser: AnswerParser | None,
        offered: OfferedTools | None,
        chance: Random | None = None,
        thoughts: ThoughtCounter | None = None,
    ) -> None:
        self._parser = parser
        self._thoughts = thoughts
        self._chance = chance or SystemRandom()
        self._offered = offered
        self._said: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._arguments: list[list[str]] = []
        """Pieces of the arguments of each call."""

    def add(self, output: RequestOutput) -> ChatDelta | None:
        """What has become certain by a piece, all that is said as one and all calls as one; None: nothing."""
        deltas = self.add_in_order(output)
        if len(deltas) <= 1:
            return deltas[0] if deltas else None
        calls = [call for delta in deltas if delta.tool_calls is not UNSET for call in delta.tool_calls]
        return ChatDelta(
            content="".join(delta.content for delta in deltas if delta.content is not UNSET) or UNSET,
            reasoning_content=deltas[0].reasoning_content,
            tool_calls=calls or UNSET,
        )

    def add_in_order(self, output: RequestOutput) -> list[ChatDelta]:
        """What has become certain by a piece, part by part: what was thought, then each text that is said or call."""
        if self._parser is None:
            parts = AnswerParts(answer=[output.text] if output.text else [])
        else:
            parts = self._parser.add(output.text, ended=output.finished)
        if self._thoughts is not None:
            self._thoughts.add(output.token_ids)
        deltas: list[ChatDelta] = []
        if parts.reasoning:
            self._reasoning.append(parts.reasoning)
            deltas.append(ChatDelta(reasoning_content=parts.reasoning))
        for part in parts.answer:
            if isinstance(part, Call):
                deltas.append(ChatDelta(tool_calls=[self._call(part)]))
            else:
                self._said.append(part)
                deltas.append(ChatDelta(content=part))
        return deltas

    @property
    def num_thought_tokens(self) -> int | None:
        """Tokens of what was thought; None: nobody can tell."""
        if self._thoughts is None:
            return None
        return self._thoughts.num_tokens if self._reasoning else 0

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
