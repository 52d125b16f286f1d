"""Translates the conversations and tools of Anthropic's messages to those of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llm_serving.errors import RequestError
from llm_serving.server.generation.conversation import nested_schema
from llm_serving.server.generation.tools import BUDGET
from llm_serving.server.protocols.anthropic.schemas import (
    AnthropicTool,
    ContentBlock,
    ConversationTurn,
    OutputConfig,
    ResultBlock,
    Thinking,
    ToolChoice,
)
from llm_serving.server.protocols.openai.schemas import (
    ChatMessage,
    ContentPart,
    Function,
    FunctionOfMessage,
    JsonObject,
    Tool,
    ToolCallOfMessage,
)

_WITHOUT_BUDGET: Final = ("disabled", "adaptive")
"""Types of `thinking` that set no budget. `disabled`: no reasoning. `adaptive`: unlimited reasoning."""
_FIELDS: Final[dict[str, frozenset[str]]] = {
    "text": frozenset({"text"}),
    "thinking": frozenset({"thinking"}),
    "redacted_thinking": frozenset(),
    "tool_use": frozenset({"id", "name", "input"}),
    "tool_result": frozenset({"tool_use_id", "content"}),
}
_NAMES: Final = tuple(name for names in _FIELDS.values() for name in sorted(names))
_CHOICES: Final[dict[str, str]] = {"auto": "auto", "any": "required", "none": "none"}


def messages_of(system: str | list[ContentBlock] | None, turns: list[ConversationTurn]) -> list[ChatMessage]:
    """Return the conversation as chat messages. Raise RequestError for an invalid or misplaced content block."""
    system_messages = [ChatMessage("system", _texts("system", system))] if system and turns else []
    messages = [message for i, turn in enumerate(turns) for message in _turn(f"messages[{i}].content", turn)]
    return system_messages + messages


def tools_of(tools: list[AnthropicTool] | None) -> list[Tool] | None:
    """Convert Anthropic's tools to those of OpenAI's chat completions. Raise RequestError for a server-side tool."""
    if tools is None:
        return None
    for i, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            raise RequestError(f"tools[{i}].type", "must be custom: this server has no tools of its own", tool.type)
    return [Tool(Function(tool.name, tool.description, tool.input_schema, tool.strict)) for tool in tools]


def choice_of(choice: ToolChoice | None) -> str | JsonObject | None:
    if choice is None:
        return None
    if choice.type == "tool":
        if not choice.name:
            raise RequestError("tool_choice.name", "is required")
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in _CHOICES:
        raise RequestError("tool_choice.type", f"must be one of {', '.join(_CHOICES)}, tool", choice.type)
    if choice.name is not None:
        raise RequestError("tool_choice.name", "requires `tool_choice.type: tool`", choice.name)
    return _CHOICES[choice.type]


def effort_of(thinking: Thinking | None) -> str | None:
    return "none" if thinking is not None and thinking.type == "disabled" else None


def budget_of(thinking: Thinking | None) -> int | None:
    """Return chat completions' `thinking_token_budget`, or None for no budget. Raise RequestError if it is invalid."""
    if thinking is None:
        return None
    if thinking.type in _WITHOUT_BUDGET:
        if thinking.budget_tokens is not None:
            raise RequestError("thinking.budget_tokens", "requires `thinking.type: enabled`", thinking.budget_tokens)
        return None
    if thinking.type != "enabled":
        raise RequestError("thinking.type", "must be enabled, adaptive or disabled", thinking.type)
    if thinking.budget_tokens is None:
        raise RequestError("thinking.budget_tokens", "is required if thinking is enabled")
    return int(BUDGET.checked("thinking.budget_tokens", thinking.budget_tokens))


def response_format_of(config: OutputConfig | None) -> JsonObject | None:
    given = None if config is None else config.format
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise RequestError("output_config.format.type", "must be json_schema", given.get("type"))
    return nested_schema(given)


def _turn(field: str, turn: ConversationTurn) -> list[ChatMessage]:
    if isinstance(turn.content, str):
        return [ChatMessage(turn.role, turn.content)]
    return (_assistant_messages if turn.role == "assistant" else _user_messages)(field, turn.content)


def _assistant_messages(field: str, blocks: list[ContentBlock]) -> list[ChatMessage]:
    texts: list[ContentPart] = []
    thoughts: list[str] = []
    calls: list[ToolCallOfMessage] = []
    for i, block in enumerate(blocks):
        _check(f"{field}[{i}]", block)
        if block.type == "tool_use":
            if block.id is None or block.name is None or block.input is None:
                raise RequestError(f"{field}[{i}]", "of type tool_use must have `id`, `name` and `input`")
            calls.append(ToolCallOfMessage(FunctionOfMessage(block.name, block.input), block.id))
        elif block.type == "thinking":
            if block.thinking is None:
                raise RequestError(f"{field}[{i}].thinking", "is required")
            thoughts.append(block.thinking)
        elif block.type != "redacted_thinking":
            texts.append(_text(f"{field}[{i}]", block))
    message = ChatMessage("assistant", texts, tool_calls=calls or None)
    message.reasoning_content = "\n".join(thoughts) or None
    return [message]


def _user_messages(field: str, blocks: list[ContentBlock]) -> list[ChatMessage]:
    """Return a message for each tool result and for the texts between them, in the order of the blocks."""
    messages: list[ChatMessage] = []
    texts: list[ContentPart] = []
    for i, block in enumerate(blocks):
        _check(f"{field}[{i}]", block)
        if block.type != "tool_result":
            texts.append(_text(f"{field}[{i}]", block))
            continue
        if block.tool_use_id is None:
            raise RequestError(f"{field}[{i}].tool_use_id", "is required")
        if texts:
            messages.append(ChatMessage("user", texts))
            texts = []
        result = _texts(f"{field}[{i}].content", block.content or "")
        messages.append(ChatMessage("tool", result, tool_call_id=block.tool_use_id))
    return [*messages, ChatMessage("user", texts)] if texts or not messages else messages


def _check(field: str, block: ContentBlock) -> None:
    for name in _NAMES:
        if getattr(block, name) is not None and name not in _FIELDS.get(block.type, _NAMES):
            raise RequestError(f"{field}.{name}", f"is not a field of a block of type {block.type}")


def _texts(field: str, content: str | Sequence[ContentBlock | ResultBlock]) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    for i, block in enumerate(content):
        if isinstance(block, ContentBlock):
            _check(f"{field}[{i}]", block)
    return [_text(f"{field}[{i}]", block) for i, block in enumerate(content)]


def _text(field: str, block: ContentBlock | ResultBlock) -> ContentPart:
    if block.type != "text":
        raise RequestError(f"{field}.type", "must be a type that is supported in this place, such as text", block.type)
    if block.text is None:
        raise RequestError(f"{field}.text", "is required")
    return ContentPart(block.type, block.text)
