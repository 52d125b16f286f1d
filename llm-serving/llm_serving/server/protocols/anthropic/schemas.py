"""Bodies of the routes of Anthropic's messages."""

from __future__ import annotations

from typing import Literal

from msgspec import Raw, Struct

from llm_serving.server.parsing.offload import Long
from llm_serving.server.protocols.openai.schemas import CallerFields, JsonObject


class ResultBlock(Struct, kw_only=True):
    type: str
    text: str | None = None


class ContentBlock(Struct, kw_only=True):
    """A part of a message: text, a tool result of the user, or reasoning or a tool call of the assistant."""

    type: str
    text: str | None = None
    id: str | None = None
    """`id`, `name` and `input` belong to `tool_use`."""
    name: str | None = None
    input: JsonObject | None = None
    tool_use_id: str | None = None
    """`tool_use_id` and `content`, a text or blocks of type text, belong to `tool_result`."""
    content: str | list[ResultBlock] | None = None
    thinking: str | None = None


class AnthropicTool(Struct, kw_only=True):
    name: str
    description: str | None = None
    input_schema: JsonObject | None = None
    type: str | None = None
    strict: bool | None = None


class ToolChoice(Struct, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ConversationTurn(Struct):
    role: Literal["user", "assistant"]
    content: str | list[ContentBlock]


class OutputConfig(Struct, kw_only=True):
    format: JsonObject | None = None
    """`{"type": "json_schema", "schema": ...}`"""


class Thinking(Struct, kw_only=True):
    type: str
    budget_tokens: int | None = None


class CountTokensRequest(Struct, kw_only=True):
    messages: list[ConversationTurn]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    """Accepted but ignored, because it does not change the prompt."""
    thinking: Thinking | None = None


class MessagesRequest(CallerFields, kw_only=True):
    messages: list[ConversationTurn]
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
    """An extension of the protocol."""


class TextBlock(Struct, tag="text", tag_field="type"):
    text: str


class ThinkingBlock(Struct, tag="thinking", tag_field="type"):
    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: Raw
    """A JSON object; {"INVALID_JSON": text} if the model wrote malformed JSON."""


ResponseBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesUsage(Struct):
    input_tokens: int
    """Without the tokens reused from the KV cache."""
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class MessagesResponse(Long, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[ResponseBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class CountTokensResponse(Struct):
    input_tokens: int
