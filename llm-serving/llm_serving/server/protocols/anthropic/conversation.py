"""Translates the conversations and tools of Anthropic's messages to those of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llm_serving.errors import RequestError
from llm_serving.server.generation.conversation import nested_schema
from llm_serving.server.generation.tools import BUDGET
from llm_serving.server.protocols.anthropic import schemas
from llm_serving.server.protocols.openai import schemas as chat

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
_AnyBlock = schemas.ContentBlock | schemas.ResultBlock
_CHOICES: Final[dict[str, str]] = {"auto": "auto", "any": "required", "none": "none"}


def messages_of(
    system: str | list[schemas.ContentBlock] | None, turns: list[schemas.ConversationTurn]
) -> list[chat.ChatMessage]:
    """Return the conversation as chat messages. Raise RequestError for an invalid or misplaced content block."""
    system_messages = [chat.ChatMessage("system", _texts("system", system))] if system and turns else []
    messages = [message for i, turn in enumerate(turns) for message in _turn(f"messages[{i}].content", turn)]
    return system_messages + messages


def tools_of(tools: list[schemas.AnthropicTool] | None) -> list[chat.Tool] | None:
    """Convert Anthropic's tools to those of OpenAI's chat completions. Raise RequestError for a server-side tool."""
    if tools is None:
        return None
    for i, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            raise RequestError(f"tools[{i}].type", "must be custom: this server has no tools of its own", tool.type)
    return [chat.Tool(chat.Function(tool.name, tool.description, tool.input_schema, tool.strict)) for tool in tools]


def choice_of(choice: schemas.ToolChoice | None) -> str | chat.JsonObject | None:
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


def budget_of(thinking: schemas.Thinking | None) -> int | None:
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


def response_format_of(config: schemas.OutputConfig | None) -> chat.JsonObject | None:
    given = None if config is None else config.format
    if given is None:
        return None
    if given.get("type") != "json_schema":
        raise RequestError("output_config.format.type", "must be json_schema", given.get("type"))
    return nested_schema(given)


def _turn(field: str, turn: schemas.ConversationTurn) -> list[chat.ChatMessage]:
    if isinstance(turn.content, str):
        return [chat.ChatMessage(turn.role, turn.content)]
    return (_assistant_messages if turn.role == "assistant" else _user_messages)(field, turn.content)


def _assistant_messages(field: str, blocks: list[schemas.ContentBlock]) -> list[chat.ChatMessage]:
    texts: list[chat.ContentPart] = []
    thoughts: list[str] = []
    calls: list[chat.ToolCallOfMessage] = []
    for i, block in enumerate(blocks):
        _check(f"{field}[{i}]", block)
        if block.type == "tool_use":
            if block.id is None or block.name is None or block.input is None:
                raise RequestError(f"{field}[{i}]", "of type tool_use must have `id`, `name` and `input`")
            calls.append(chat.ToolCallOfMessage(chat.FunctionOfMessage(block.name, block.input), block.id))
        elif block.type == "thinking":
            if block.thinking is None:
                raise RequestError(f"{field}[{i}].thinking", "is required")
            thoughts.append(block.thinking)
        elif block.type != "redacted_thinking":
            texts.append(_text(f"{field}[{i}]", block))
    message = chat.ChatMessage("assistant", texts, tool_calls=calls or None)
    message.reasoning_content = "\n".join(thoughts) or None
    return [message]


def _user_messages(field: str, blocks: list[schemas.ContentBlock]) -> list[chat.ChatMessage]:
    """Return a message for each tool result and for the texts between them, in the order of the blocks."""
    messages: list[chat.ChatMessage] = []
    texts: list[chat.ContentPart] = []
    for i, block in enumerate(blocks):
        _check(f"{field}[{i}]", block)
        if block.type != "tool_result":
            texts.append(_text(f"{field}[{i}]", block))
            continue
        if block.tool_use_id is None:
            raise RequestError(f"{field}[{i}].tool_use_id", "is required")
        if texts:
            messages.append(chat.ChatMessage("user", texts))
            texts = []
        result = _texts(f"{field}[{i}].content", block.content or "")
        messages.append(chat.ChatMessage("tool", result, tool_call_id=block.tool_use_id))
    return [*messages, chat.ChatMessage("user", texts)] if texts or not messages else messages


def _check(field: str, block: schemas.ContentBlock) -> None:
    for name in _NAMES:
        if getattr(block, name) is not None and name not in _FIELDS.get(block.type, _NAMES):
            raise RequestError(f"{field}.{name}", f"is not a field of a block of type {block.type}")


def _texts(field: str, content: str | Sequence[_AnyBlock]) -> str | list[chat.ContentPart]:
    if isinstance(content, str):
        return content
    for i, block in enumerate(content):
        if isinstance(block, schemas.ContentBlock):
            _check(f"{field}[{i}]", block)
    return [_text(f"{field}[{i}]", block) for i, block in enumerate(content)]


def _text(field: str, block: _AnyBlock) -> chat.ContentPart:
    if block.type != "text":
        raise RequestError(f"{field}.type", "must be a type that is supported in this place, such as text", block.type)
    if block.text is None:
        raise RequestError(f"{field}.text", "is required")
    return chat.ContentPart(block.type, block.text)
