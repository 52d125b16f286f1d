"""Splits the outputs of one choice into deltas of reasoning, content and tool calls, and joins deltas to a message."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from random import Random, SystemRandom
from typing import Final, NamedTuple

from msgspec import UNSET

from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.server.generation.tools import OfferedTools, ReasoningTokenCounter
from llm_serving.server.protocols.openai.schemas import (
    CalledFunction,
    ChatDelta,
    ChatResponseMessage,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from llm_serving.text.answer_parser import AnswerParser
from llm_serving.text.tool_parsers import Call, Part, Thought

CALLED: Final = "tool_calls"


@dataclass(eq=False)
class MessageParser:
    """Splits the outputs of one choice into deltas. Without a `parser`, all text is content."""

    parser: AnswerParser | None
    offered: OfferedTools | None
    rng: Random = field(default_factory=SystemRandom)
    counter: ReasoningTokenCounter | None = None
    _has_reasoning: bool = False
    _num_calls: int = 0
    _call_ids: set[str] = field(default_factory=set)

    def delta(self, output: RequestOutput) -> ChatDelta | None:
        deltas = self.deltas(output)
        if len(deltas) <= 1:
            return deltas[0] if deltas else None
        calls = [call for delta in deltas if delta.tool_calls is not UNSET for call in delta.tool_calls]
        return ChatDelta(
            content="".join(delta.content for delta in deltas if delta.content is not UNSET) or UNSET,
            reasoning_content="".join(
                delta.reasoning_content for delta in deltas if delta.reasoning_content is not UNSET
            )
            or UNSET,
            tool_calls=calls or UNSET,
        )

    def deltas(self, output: RequestOutput) -> list[ChatDelta]:
        if self.parser is None:
            parts: list[Part] = [output.text] if output.text else []
        else:
            parts = self.parser.add(output.text, ended=output.finished)
        if self.counter is not None:
            self.counter.add(output.token_ids)
        deltas: list[ChatDelta] = []
        for part in parts:
            if isinstance(part, Call):
                deltas.append(ChatDelta(tool_calls=[self._call(part)]))
            elif isinstance(part, Thought):
                self._has_reasoning = True
                deltas.append(ChatDelta(reasoning_content=part.text))
            else:
                deltas.append(ChatDelta(content=part))
        return deltas

    @property
    def is_plain(self) -> bool:
        return self.parser is None and self.counter is None

    @property
    def num_reasoning_tokens(self) -> int | None:
        if self.counter is None:
            return None
        return self.counter.num_tokens if self._has_reasoning else 0

    def finish_reason(self, output: RequestOutput) -> str | None:
        return CALLED if self._num_calls and output.finish_reason is FinishReason.STOP else output.finish_reason

    def _call(self, call: Call) -> ToolCallDelta:
        if not call.name:
            return ToolCallDelta(index=self._num_calls - 1, function=FunctionDelta(call.arguments))
        assert self.offered is not None
        self._num_calls += 1
        is_new = bool(call.id) and call.id not in self._call_ids
        self._call_ids.add(call.id)
        return ToolCallDelta(
            index=self._num_calls - 1,
            id=call.id if is_new else self.offered.new_id(self.rng),
            type="function",
            function=FunctionDelta(call.arguments, call.name),
        )


class MessageFold:
    """Joins the deltas of one choice to a message. `echo` is the text with which the content begins."""

    def __init__(self, echo: str) -> None:
        self._content = [echo]
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._arguments: list[list[str]] = []

    def add(self, delta: ChatDelta) -> None:
        if delta.content is not UNSET:
            self._content.append(delta.content)
        if delta.reasoning_content is not UNSET:
            self._reasoning.append(delta.reasoning_content)
        for call in () if delta.tool_calls is UNSET else delta.tool_calls:
            if call.id is not UNSET and call.function.name is not UNSET:
                self._calls.append(ToolCall(id=call.id, function=CalledFunction(call.function.name, "")))
                self._arguments.append([])
            self._arguments[-1].append(call.function.arguments)

    def message(self) -> ChatResponseMessage:
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        for call, arguments in zip(self._calls, self._arguments, strict=True):
            call.function.arguments = "".join(arguments)
        return ChatResponseMessage(
            content=None if self._calls and not content else content,
            reasoning_content=reasoning or UNSET,
            tool_calls=self._calls or UNSET,
        )


class BlockKind(enum.Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(eq=False, slots=True)
class MessageBlock:
    """A part of a message: reasoning, content, or one tool call. Only a tool call has `id` and `name`."""

    kind: BlockKind
    index: int
    id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockDelta(NamedTuple):
    block: MessageBlock
    is_new: bool
    text: str


class MessageBlocks:
    """The message of one choice as a list of blocks, for protocols that use blocks."""

    def __init__(self, parser: MessageParser) -> None:
        self.parser = parser
        self.blocks: list[MessageBlock] = []

    def add(self, output: RequestOutput) -> list[BlockDelta]:
        return [self._add_delta(delta) for delta in self.parser.deltas(output)]

    def _add_delta(self, delta: ChatDelta) -> BlockDelta:
        if delta.tool_calls is not UNSET:
            [call] = delta.tool_calls
            is_new = call.id is not UNSET
            block = self._open(BlockKind.CALL) if is_new else self.blocks[-1]
            if call.id is not UNSET and call.function.name is not UNSET:
                block.id, block.name = call.id, call.function.name
            return self._add(block, is_new, call.function.arguments)
        if delta.content is not UNSET:
            return self.add_text(BlockKind.TEXT, delta.content)
        assert delta.reasoning_content is not UNSET
        return self.add_text(BlockKind.REASONING, delta.reasoning_content)

    def add_text(self, kind: BlockKind, text: str) -> BlockDelta:
        is_new = not self.blocks or self.blocks[-1].kind is not kind
        return self._add(self._open(kind) if is_new else self.blocks[-1], is_new, text)

    def _open(self, kind: BlockKind) -> MessageBlock:
        self.blocks.append(MessageBlock(kind, len(self.blocks)))
        return self.blocks[-1]

    def _add(self, block: MessageBlock, is_new: bool, text: str) -> BlockDelta:
        block.parts.append(text)
        return BlockDelta(block, is_new, text)
