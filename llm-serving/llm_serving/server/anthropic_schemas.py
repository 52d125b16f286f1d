"""Bodies of the routes of Anthropic's messages."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from llm_serving.server.off_loop import Long
from llm_serving.server.schemas import CallerFields, JsonObject


class ResultBlock(Struct, kw_only=True):
    """A part of what a tool gave."""

    type: str
    text: str | None = None


class ContentBlock(Struct, kw_only=True):
    """Something said; of the assistant also a call of a tool or a thought, of the user also what a tool gave."""

    type: str
    text: str | None = None
    id: str | None = None
    """Of `tool_use`; so are name and input."""
    name: str | None = None
    input: JsonObject | None = None
    tool_use_id: str | None = None
    """Of `tool_result`; so is content: a text, or blocks of type text."""
    content: str | list[ResultBlock] | None = None
    thinking: str | None = None


class AnthropicTool(Struct, kw_only=True):
    name: str
    description: str | None = None
    input_schema: JsonObject | None = None
    type: str | None = None
    """`custom`, if anything."""
    strict: bool | None = None


class ToolChoice(Struct, kw_only=True):
    type: str
    """auto, any, tool or none."""
    name: str | None = None
    """Of `tool`."""
    disable_parallel_tool_use: bool | None = None
    """Of several calls only the first is told."""


class ConversationTurn(Struct):
    role: Literal["user", "assistant"]
    content: str | list[ContentBlock]


class OutputConfig(Struct, kw_only=True):
    format: JsonObject | None = None
    """`{"type": "json_schema", "schema": ...}`: what the text of the answer is."""


class Thinking(Struct, kw_only=True):
    type: str
    """enabled, adaptive or disabled."""
    budget_tokens: int | None = None
    """Of `enabled`: tokens behind which the answer follows."""


class CountTokensRequest(Struct, kw_only=True):
    messages: list[ConversationTurn]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    """Changes no token of the prompt."""
    thinking: Thinking | None = None
    """Changes no token of the prompt."""


class MessagesRequest(CallerFields, kw_only=True):
    messages: list[ConversationTurn]
    """The answer goes on with the last one where that is the assistant's."""
    max_tokens: int
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    stream: bool | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stop_sequences: list[str] | None = None
    seed: int | None = None
    """Beyond the protocol: the same seed has the same answer."""


class TextBlock(Struct, tag="text", tag_field="type"):
    text: str


class ThinkingBlock(Struct, tag="thinking", tag_field="type"):
    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: Raw
    """A JSON object; where the model wrote none, {"INVALID_JSON": what it wrote}."""


AnsweredBlock = TextBlock | ThinkingBlock | ToolUseBlock


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
    content: list[AnsweredBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class TextDelta(Struct, tag="text_delta", tag_field="type"):
    text: str


class ThinkingDelta(Struct, tag="thinking_delta", tag_field="type"):
    thinking: str


class InputDelta(Struct, tag="input_json_delta", tag_field="type"):
    partial_json: str


class MessageDelta(Struct):
    stop_reason: str | None
    stop_sequence: str | None


class StreamEvent(Struct, kw_only=True):
    """One event of a stream; which fields it has depends on its type."""

    type: str
    message: MessageAnswer | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: AnsweredBlock | UnsetType = UNSET
    delta: TextDelta | ThinkingDelta | InputDelta | MessageDelta | UnsetType = UNSET
    usage: MessagesUsage | UnsetType = UNSET


class ErrorBody(Struct):
    type: str
    message: str


class MessagesError(Struct):
    error: ErrorBody
    type: str = "error"


class CountTokensResponse(Struct):
    input_tokens: int
