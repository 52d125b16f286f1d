"""Translates the conversations and tools of OpenAI's responses to those of chat completions, and back."""

from __future__ import annotations

from typing import Final

from llm_serving.errors import RequestError
from llm_serving.server.generation.conversation import nested_schema
from llm_serving.server.generation.structured_output import refuse_unknown_keys
from llm_serving.server.generation.tools import arguments_of
from llm_serving.server.protocols.openai import responses_schemas as schemas
from llm_serving.server.protocols.openai import schemas as chat

_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content", "summary"),
}
_OPTIONAL: Final = {"content", "summary"}
_NAMES: Final = tuple(dict.fromkeys(name for names in _FIELDS.values() for name in names))


def messages_of(items: str | list[schemas.InputItem]) -> list[chat.ChatMessage]:
    """Return chat messages. Merge consecutive items of the assistant. Raise RequestError if an item is invalid."""
    if isinstance(items, str):
        return [chat.ChatMessage("user", items)]
    messages: list[chat.ChatMessage] = []
    is_open = False  # whether the assistant's next item belongs to the last message
    for index, item in enumerate(items):
        _check(f"input[{index}]", item)
        if item.type == "function_call_output":
            messages.append(chat.ChatMessage("tool", _text(item.output), tool_call_id=item.call_id))
            is_open = False
            continue
        is_assistant = item.type != "message" or item.role == "assistant"
        if not is_assistant:
            messages.append(chat.ChatMessage(str(item.role), _text(item.content)))
            is_open = False
            continue
        if not is_open or (item.type != "function_call" and messages[-1].content) or item.type == "reasoning":
            messages.append(chat.ChatMessage("assistant", ""))
            is_open = True
        last = messages[-1]
        if item.type == "message":
            last.content = _text(item.content)
        elif item.type == "reasoning":
            last.reasoning_content = _text(item.content or item.summary or "") or None
        else:
            arguments_of(f"input[{index}].arguments", str(item.arguments))
            call = chat.ToolCallOfMessage(chat.FunctionOfMessage(str(item.name), str(item.arguments)), item.call_id)
            last.tool_calls = [*(last.tool_calls or []), call]
    return messages


def items_of(messages: list[chat.ChatMessage], name: str) -> list[schemas.GivenItem]:
    """Return a conversation as items, the inverse of `messages_of`. The id of each item contains `name`."""
    items: list[schemas.GivenItem] = []

    def new_id(prefix: str) -> str:
        return f"{prefix}_{name}_in_{len(items)}"

    for message in messages:
        text = str(message.content)
        if message.role == "tool":
            items.append(schemas.FunctionOutputItem(id=new_id("fco"), call_id=message.tool_call_id, output=text))
        elif message.role != "assistant":
            items.append(schemas.InputMessage(id=new_id("msg"), role=message.role, content=[schemas.InputText(text)]))
        else:
            if message.reasoning_content:
                thought = [schemas.ReasoningText(message.reasoning_content)]
                items.append(schemas.ReasoningItem(id=new_id("rs"), content=thought, status="completed"))
            if text or not (message.reasoning_content or message.tool_calls):
                content = [schemas.OutputText(text)]
                items.append(schemas.OutputMessage(id=new_id("msg"), status="completed", content=content))
            for call in message.tool_calls or ():
                function = call.function
                items.append(
                    schemas.FunctionCallItem(
                        id=new_id("fc"),
                        call_id=call.id or "",
                        name=function.name,
                        arguments=str(function.arguments),
                        status="completed",
                    )
                )
    return items


def tools_of(tools: list[schemas.FunctionTool] | None) -> list[chat.Tool] | None:
    """Return the tools of chat completions. Raise RequestError for a tool that is not a function."""
    if tools is None:
        return None
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise RequestError(f"tools[{i}].type", "must be function: this server has no tools of its own", tool.type)
        if tool.name is None:
            raise RequestError(f"tools[{i}].name", "is required")
    return [chat.Tool(chat.Function(str(tool.name), tool.description, tool.parameters, tool.strict)) for tool in tools]


def choice_of(choice: str | chat.JsonObject | None) -> str | chat.JsonObject | None:
    """Convert a `tool_choice` to that of chat completions, which has the name of a function inside `function`. Leave an
    object that already has the key `function` unchanged. Raise RequestError for any other object.
    """
    if not isinstance(choice, dict) or "function" in choice:
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise RequestError("tool_choice", 'must be auto, none, required or {"type": "function", "name": ...}', choice)
    refuse_unknown_keys("tool_choice", choice, ("type", "name"))
    return {"type": "function", "function": {"name": choice["name"]}}


def response_format_of(text: chat.JsonObject | None) -> chat.JsonObject | None:
    """Return the `response_format` of chat completions. Raise RequestError if `text` is not supported."""
    for name, value in (text or {}).items():
        if name == "verbosity" and value in (None, "medium"):
            continue
        if name != "format":
            raise RequestError(f"text.{name[:60]}", "is not supported", value)
    given = (text or {}).get("format")
    if given is not None and not isinstance(given, dict):
        raise RequestError("text.format", "must be an object", given)
    if given is None or given.get("type") != "json_schema":
        return given
    return nested_schema(given)


def _check(field: str, item: schemas.InputItem) -> None:
    own = _FIELDS[item.type]
    for name in _NAMES:
        given = getattr(item, name) is not None
        if given and name not in own:
            raise RequestError(f"{field}.{name}", f"is not a field of an item of type {item.type}")
        if not given and name in own and not (item.type == "reasoning" and name in _OPTIONAL):
            raise RequestError(f"{field}.{name}", "is required")


def _text(content: str | list[schemas.InputPart] | None) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content or ())
