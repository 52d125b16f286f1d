"""One answer of a conversation as blocks that follow one another, for protocols whose answers consist of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import UNSET

from llm_serving.core.request_output import RequestOutput
from llm_serving.server.answered_message import AnsweredMessage
from llm_serving.server.schemas import ChatDelta


class BlockKind(enum.Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(eq=False, slots=True)
class Block:
    """What was thought or said in a row, or a call."""

    kind: BlockKind
    index: int
    id: str = ""
    """Of a call; so is its name."""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    """Of its text; of a call, of its arguments."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Told(NamedTuple):
    """What has become certain of a block."""

    block: Block
    begins: bool
    text: str


class AnswerBlocks:
    """Puts the parts of an answer into blocks: another kind of part, and every call, begins one.

    Args:
        message: Takes the text of the answer apart.
    """

    def __init__(self, message: AnsweredMessage) -> None:
        self._message = message
        self.blocks: list[Block] = []

    def add(self, output: RequestOutput) -> list[Told]:
        """What a piece adds, in order."""
        return [self._told(delta) for delta in self._message.add_in_order(output)]

    def say_nothing(self) -> Told:
        """An answer without anything in it, as a block."""
        return self._add(self._begin(BlockKind.TEXT), True, "")

    def finish_reason(self, output: RequestOutput) -> str | None:
        """Why the answer ended: as `AnsweredMessage` tells it."""
        return self._message.finish_reason(output)

    @property
    def num_thought_tokens(self) -> int | None:
        """As `AnsweredMessage` tells it."""
        return self._message.num_thought_tokens

    def _told(self, delta: ChatDelta) -> Told:
        if delta.tool_calls is not UNSET:
            [call] = delta.tool_calls
            begins = call.id is not UNSET
            block = self._begin(BlockKind.CALL) if begins else self.blocks[-1]
            if call.id is not UNSET and call.function.name is not UNSET:
                block.id, block.name = call.id, call.function.name
            return self._add(block, begins, call.function.arguments)
        if delta.content is not UNSET:
            return self._told_text(BlockKind.TEXT, delta.content)
        assert delta.reasoning_content is not UNSET
        return self._told_text(BlockKind.REASONING, delta.reasoning_content)

    def _told_text(self, kind: BlockKind, text: str) -> Told:
        begins = not self.blocks or self.blocks[-1].kind is not kind
        return self._add(self._begin(kind) if begins else self.blocks[-1], begins, text)

    def _begin(self, kind: BlockKind) -> Block:
        self.blocks.append(Block(kind, len(self.blocks)))
        return self.blocks[-1]

    def _add(self, block: Block, begins: bool, text: str) -> Told:
        block.pieces.append(text)
        return Told(block, begins, text)
