"""Adapts messages to what a chat template reads: its roles, fields and types of values."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from llm_serving.text.tool_parsers import TOOL_FORMATS, format_in

FALLBACK_ROLES: Final = {"developer": "system", "function": "tool"}
"""Role -> its replacement for chat templates that do not mention it."""
_THINKING: Final = re.compile(r"\.thinking\b|\[['\"]thinking['\"]\]")
_NO_CONTENT: Final = re.compile(r"\[['\"]content['\"]\] is none\b")
_ARGUMENTS_AS_TEXT: Final = re.compile(
    r"\+\s*\w+(?:\[['\"]function['\"]\]|\.function)?(?:\[['\"]arguments['\"]\]|\.arguments)\s*(?:\+|-?\}\})"
)
"""Matches templates that append a call's arguments to a string, so that the arguments must be a string."""
_TOOLS: Final = re.compile(r"\btools\b")
_ONE_TEXT: Final = "message.content and message.thinking"
"""Text in templates (gpt-oss) that reject a message with calls, `content` and `thinking`."""


def template_role(template: str, role: str) -> str:
    is_named = f"'{role}'" in template or f'"{role}"' in template
    return role if is_named else FALLBACK_ROLES.get(role, role)


def adapted_message(template: str, message: dict[str, Any]) -> dict[str, Any]:
    """Convert a message of `template_message` to the role, fields and types that this template reads."""
    adapted = message | {"role": template_role(template, message["role"])}
    calls = message.get("tool_calls")
    if "reasoning_content" in message and "reasoning_content" not in template and _THINKING.search(template):
        adapted["thinking"] = adapted.pop("reasoning_content")
        if calls and message["content"] and _ONE_TEXT in template:
            adapted |= {"thinking": f"{adapted['thinking']}\n\n{message['content']}", "content": ""}
    if calls and not message["content"] and _NO_CONTENT.search(template):
        adapted["content"] = None
    if calls and _ARGUMENTS_AS_TEXT.search(template):
        adapted["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": _text(call["function"]["arguments"])}}
            for call in calls
        ]
    return adapted


def shows_tools(template: str) -> bool:
    return _TOOLS.search(template) is not None


def with_system_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Append a text to the system message, or to a new one if there is none."""
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [first | {"content": f"{first['content']}\n\n{text}" if first["content"] else text}, *messages[1:]]


def with_shown_calls(template: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Append calls to the content of their messages, if the template does not render calls."""
    name = None if "tool_calls" in template else format_in(template)
    write = None if name is None else TOOL_FORMATS[name].written
    if write is None:
        return messages
    shown = []
    for message in messages:
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        shown.append(message | {"content": message["content"] + write(calls)} if calls else message)
    return shown


def _text(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)
