"""Conversations and tools of Anthropic's messages as those of chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llm_serving.errors import RequestError
from llm_serving.server.anthropic_schemas import (
    AnthropicTool,
    ContentBlock,
    ConversationTurn,
    OutputConfig,
    ResultBlock,
    Thinking,
    ToolChoice,
)
from llm_serving.server.flat_fields import nested_schema
from llm_serving.server.schemas import (
    ChatMessage,
    ContentPart,
    Function,
    FunctionOfMessage,
    JsonObject,
    Tool,
    ToolCallOfMessage,
)
from llm_serving.server.thinking import BUDGET

_WITHOUT_BUDGET: Final = ("disabled", "adaptive")
"""Of thoughts: none, and as many as the model has."""
_FIELDS: Final[dict[str, frozenset[str]]] = {
    "text": frozenset({"text"}),
    "thinking": frozenset({"thinking"}),
    "redacted_thinking": frozenset(),
    "tool_use": frozenset({"id", "name", "input"}),
    "tool_result": frozenset({"tool_use_id", "content"}),
}
"""Type of a block -> the fields that it has."""
_NAMES: Final = tuple(name for names in _FIELDS.values() for name in sorted(names))
_CHOICES: Final[dict[str, str]] = {"auto": "auto", "any": "required", "none": "none"}


def messages_of(system: str | list[ContentBlock] | None, turns: list[ConversationTurn]) -> list[ChatMessage]:
    """The conversation as chat templates know it; nothing is added to what holds nothing.

    Raises:
        RequestError: A block has no place where it stands.
    """
    opening = [ChatMessage("system", _texts("system", system))] if system and turns else []
    said = [message for i, turn in enumerate(turns) for message in _turn(f"messages[{i}].content", turn)]
    return opening + said


def tools_of(tools: list[AnthropicTool] | None) -> list[Tool] | None:
    """Raises RequestError where one is computed by who serves it."""
    if tools is None:
        return None
    for i, tool in enumerate(tools):
        if tool.type not in (None, "custom"):
            raise RequestError(f"tools[{i}].type", "must be custom: this server has no tools of its own", tool.type)
    return [Tool(Function(tool.name, tool.description, tool.input_schema, tool.strict)) for tool in tools]


def choice_of(choice: ToolChoice | None) -> str | JsonObject | None:
    """`tool_choice` of chat.

    Raises:
        RequestError: It is none of the protocol.
    """
    if choice is None:
        return None
    if choice.type == "tool":
        if not choice.name:
            raise RequestError("tool_choice.name", "is required")
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in _CHOICES:
        raise RequestError("tool_choice.type", f"must be one of {', '.join(_CHOICES)}, tool", choice.type)
    if choice.name is not None:
        raise RequestError("tool_choice.name", "must be given with type tool only", choice.name)
    return _CHOICES[choice.type]


def effort_of(thinking: Thinking | None) -> str | None:
    """`reasoning_effort` of chat."""
    return "none" if thinking is not None and thinking.type == "disabled" else None


def budget_of(thinking: Thinking | None) -> int | None:
    """`thinking_token_budget` of chat.

    Raises:
        RequestError: It is of another make.
    """
    if thinking is None:
        return None
    if thinking.type in _WITHOUT_BUDGET:
        if thinking.budget_tokens is not None:
            raise RequestError("thinking.budget_tokens", "must be given with type enabled only", thinking.budget_tokens)
        return None
    if thinking.type != "enabled":
        raise RequestError("thinking.type", "must be enabled, adaptive or disabled", thinking.type)
    if thinking.budget_tokens is None:
        raise RequestError("thinking.budget_tokens", "must be given where thinking is enabled")
    return int(BUDGET.checked("thinking.budget_tokens", thinking.budget_tokens))


def form_of(config: OutputConfig | None) -> JsonObject | None:
    """`response_format` of chat.

    Raises:
        RequestError: It is no JSON schema.
    """
    form = None if config is None else config.format
    if form is None:
        return None
    if form.get("type") != "json_schema":
        raise RequestError("output_config.format.type", "must be json_schema", form.get("type"))
    return nested_schema(form)


def _turn(place: str, turn: ConversationTurn) -> list[ChatMessage]:
    if isinstance(turn.content, str):
        return [ChatMessage(turn.role, turn.content)]
    return (_said_by_assistant if turn.role == "assistant" else _said_by_user)(place, turn.content)


def _said_by_assistant(place: str, blocks: list[ContentBlock]) -> list[ChatMessage]:
    texts: list[ContentPart] = []
    thoughts: list[str] = []
    calls: list[ToolCallOfMessage] = []
    for i, block in enumerate(blocks):
        _check(f"{place}[{i}]", block)
        if block.type == "tool_use":
            if block.id is None or block.name is None or block.input is None:
                raise RequestError(f"{place}[{i}]", "of type tool_use must have `id`, `name` and `input`")
            calls.append(ToolCallOfMessage(FunctionOfMessage(block.name, block.input), block.id))
        elif block.type == "thinking":
            if block.thinking is None:
                raise RequestError(f"{place}[{i}].thinking", "is required")
            thoughts.append(block.thinking)
        elif block.type != "redacted_thinking":
            texts.append(_text(f"{place}[{i}]", block))
    message = ChatMessage("assistant", texts, tool_calls=calls or None)
    message.reasoning_content = "\n".join(thoughts) or None
    return [message]


def _said_by_user(place: str, blocks: list[ContentBlock]) -> list[ChatMessage]:
    """Results of tools are messages of their own, in the order of the blocks."""
    messages: list[ChatMessage] = []
    texts: list[ContentPart] = []
    for i, block in enumerate(blocks):
        _check(f"{place}[{i}]", block)
        if block.type != "tool_result":
            texts.append(_text(f"{place}[{i}]", block))
            continue
        if block.tool_use_id is None:
            raise RequestError(f"{place}[{i}].tool_use_id", "is required")
        if texts:
            messages.append(ChatMessage("user", texts))
            texts = []
        result = _texts(f"{place}[{i}].content", block.content or "")
        messages.append(ChatMessage("tool", result, tool_call_id=block.tool_use_id))
    return [*messages, ChatMessage("user", texts)] if texts or not messages else messages


def _check(place: str, block: ContentBlock) -> None:
    """Raises RequestError where a block has what another type of block has."""
    for name in _NAMES:
        if getattr(block, name) is not None and name not in _FIELDS.get(block.type, _NAMES):
            raise RequestError(f"{place}.{name}", f"is no field of a block of type {block.type}")


def _texts(place: str, content: str | Sequence[ContentBlock | ResultBlock]) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    for i, block in enumerate(content):
        if isinstance(block, ContentBlock):
            _check(f"{place}[{i}]", block)
    return [_text(f"{place}[{i}]", block) for i, block in enumerate(content)]


def _text(place: str, block: ContentBlock | ResultBlock) -> ContentPart:
    if block.type != "text":
        raise RequestError(f"{place}.type", "must be text here", block.type)
    if block.text is None:
        raise RequestError(f"{place}.text", "is required")
    return ContentPart(block.type, block.text)
