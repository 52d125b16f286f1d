"""Parses the outputs of one choice into the blocks of its message: reasoning, text and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random, SystemRandom
from typing import Final, Literal

from llm_serving.core.request import FinishReason
from llm_serving.core.request_output import RequestOutput
from llm_serving.server.generation.tools import OfferedTools, ReasoningTokenCounter
from llm_serving.text.answer_parser import AnswerParser
from llm_serving.text.tool_parsers import Call, Part, Thought

CALLED: Final = "tool_calls"


BlockKind = Literal["reasoning", "text", "call"]


@dataclass(eq=False, slots=True)
class MessageBlock:
    """A part of a message: reasoning, text, or one tool call. Only a tool call has `id` and `name`."""

    kind: BlockKind
    index: int
    index_in_kind: int = 0
    """Index among the blocks of the same kind."""
    id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


BlockDelta = tuple[MessageBlock, bool, str]
"""(block, whether the block is new, text to append to it). A plain tuple, because each output creates one."""


@dataclass(eq=False)
class MessageParser:
    """Parses the outputs of one choice into blocks. Without a `parser`, all text is one block."""

    parser: AnswerParser | None
    offered: OfferedTools | None
    rng: Random = field(default_factory=SystemRandom)
    counter: ReasoningTokenCounter | None = None
    blocks: list[MessageBlock] = field(default_factory=list)

    def parse(self, output: RequestOutput) -> list[BlockDelta]:
        """Return what an output adds to the message, without adding its text to the blocks."""
        if self.counter is not None:
            self.counter.add(output.token_ids)
        if self.parser is None:
            return [self._delta(output.text)] if output.text else []
        return [self._delta(part) for part in self.parser.add(output.text, ended=output.finished)]

    def fold(self, output: RequestOutput) -> list[BlockDelta]:
        """Return what an output adds to the message, and add its text to the blocks."""
        deltas = self.parse(output)
        for block, _, text in deltas:
            block.parts.append(text)
        return deltas

    def open(self, kind: BlockKind) -> MessageBlock:
        block = MessageBlock(kind, len(self.blocks), len(self.of_kind(kind)))
        self.blocks.append(block)
        return block

    def of_kind(self, kind: BlockKind) -> list[MessageBlock]:
        return [block for block in self.blocks if block.kind == kind]

    def text(self, kind: BlockKind) -> str:
        """Return the folded text of all blocks of a kind."""
        return "".join(block.text for block in self.of_kind(kind))

    @property
    def is_plain(self) -> bool:
        return self.parser is None and self.counter is None

    @property
    def num_reasoning_tokens(self) -> int | None:
        if self.counter is None:
            return None
        return self.counter.num_tokens if self.of_kind("reasoning") else 0

    def finish_reason(self, output: RequestOutput) -> str | None:
        if output.finish_reason is None:
            return None
        return CALLED if output.finish_reason is FinishReason.STOP and self.of_kind("call") else output.finish_reason

    def _delta(self, part: Part) -> BlockDelta:
        if isinstance(part, Call):
            return self._call_delta(part)
        kind: BlockKind
        kind, text = ("reasoning", part.text) if isinstance(part, Thought) else ("text", part)
        last = self.blocks[-1] if self.blocks else None
        return (self.open(kind), True, text) if last is None or last.kind != kind else (last, False, text)

    def _call_delta(self, call: Call) -> BlockDelta:
        if not call.name:
            return self.blocks[-1], False, call.arguments
        assert self.offered is not None
        is_unique = call.id and all(call.id != block.id for block in self.blocks)
        block = self.open("call")
        block.id, block.name = call.id if is_unique else self.offered.new_id(self.rng), call.name
        return block, True, call.arguments
