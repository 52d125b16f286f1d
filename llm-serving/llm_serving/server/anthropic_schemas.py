"""Bodies of the routes of Anthropic's messages."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from llm_serving.server.off_loop import Long
from llm_serving.server.schemas import CallerFields


class ContentBlock(Struct):
    type: str
    text: str | None = None


class ConversationTurn(Struct):
    role: Literal["user", "assistant"]
    content: str | list[ContentBlock]


class CountTokensRequest(Struct, kw_only=True):
    messages: list[ConversationTurn]
    model: str | None = None
    system: str | list[ContentBlock] | None = None


class MessagesRequest(CallerFields, kw_only=True):
    messages: list[ConversationTurn]
    """The answer goes on with the last one where that is the assistant's."""
    max_tokens: int
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    seed: int | None = None
    """Beyond the protocol: the same seed has the same answer."""


class TextBlock(Struct, tag="text", tag_field="type"):
    text: str


class MessagesUsage(Struct):
    input_tokens: int
    """Of the prompt, those that were computed for this answer."""
    output_tokens: int
    cache_read_input_tokens: int
    """Of the prompt, those whose keys and values were there."""
    cache_creation_input_tokens: int = 0


class MessageAnswer(Long, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[TextBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class TextDelta(Struct, tag="text_delta", tag_field="type"):
    text: str


class MessageDelta(Struct):
    stop_reason: str | None
    stop_sequence: str | None


class StreamEvent(Struct, kw_only=True):
    """One event of a stream; which fields it has depends on its type."""

    type: str
    message: MessageAnswer | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: TextBlock | UnsetType = UNSET
    delta: TextDelta | MessageDelta | UnsetType = UNSET
    usage: MessagesUsage | UnsetType = UNSET


class ErrorBody(Struct):
    type: str
    message: str


class MessagesError(Struct):
    error: ErrorBody
    type: str = "error"


class CountTokensResponse(Struct):
    input_tokens: int
