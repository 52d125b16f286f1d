"""The tools a conversation offers, and how its answers are taken apart."""

from __future__ import annotations

import json
import re
import string
from dataclasses import dataclass
from random import Random
from typing import Any, Final

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.server.schemas import ChatCompletionRequest, Tool, ToolCallOfMessage
from llm_serving.text.answer_parts import AnswerParser
from llm_serving.text.reasoning import CLOSING, OPENING, ReasoningParser
from llm_serving.text.tools import TOOL_FORMATS, ToolFormat, format_in

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_ID_CHARS: Final = string.ascii_letters + string.digits
_TAIL_TOKENS: Final = 16
"""Of a prompt, in which an opening that it ends with has room."""


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """Tools that the model may call."""

    names: frozenset[str]
    for_template: list[dict[str, Any]]
    format: ToolFormat

    def new_id(self, chance: Random) -> str:
        """An id for a call, drawn by `chance`."""
        return self.format.id_prefix + "".join(chance.choice(_ID_CHARS) for _ in range(self.format.id_chars))


def offered_tools(engine: AsyncEngine, request: ChatCompletionRequest) -> OfferedTools | None:
    """What the request offers; None: nothing, or nothing that may be called.

    Raises:
        RequestError: A tool or the choice among them breaks a rule, or the model's calls could not be read.
    """
    choice = request.tool_choice
    if choice not in (None, "auto", "none"):
        raise RequestError("tool_choice", "must be auto or none: calls are not enforced", choice)
    if not request.tools:
        return None
    _check(request.tools)
    if choice == "none":
        return None
    wanted = engine.config.serving.tool_call_parser
    name = format_in(engine.tokenizer.chat_template(with_tools=True)) if wanted == "auto" else wanted
    if name is None or name not in TOOL_FORMATS:
        why = "is not supported: the model's chat template shows no known form of calls"
        raise RequestError("tools", f"{why}; serving_config.tool_call_parser: {wanted}")
    return OfferedTools(
        frozenset(tool.function.name for tool in request.tools),
        [_for_template(tool) for tool in request.tools],
        TOOL_FORMATS[name],
    )


def answer_parser(
    engine: AsyncEngine, request: ChatCompletionRequest, prompt: list[int], offered: OfferedTools | None
) -> AnswerParser | None:
    """What takes one answer of the request apart; None: all of it is text."""
    reasoning = _reasoning_parser(engine, request, prompt)
    if reasoning is None and offered is None:
        return None
    tools = None if offered is None else offered.format.create(offered.names)
    return AnswerParser(reasoning, tools, 1 if request.parallel_tool_calls is False else None)


def plain_call(place: str, call: ToolCallOfMessage) -> dict[str, Any]:
    """What a chat template gets of a call in a message.

    Raises:
        RequestError: Its arguments are no JSON object.
    """
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = ""
    if not isinstance(arguments, dict):
        raise RequestError(f"{place}.function.arguments", "must be a JSON object", call.function.arguments)
    plain = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return plain if call.id is None else {"id": call.id} | plain


def _reasoning_parser(engine: AsyncEngine, request: ChatCompletionRequest, prompt: list[int]) -> ReasoningParser | None:
    wanted, template = engine.config.serving.reasoning_parser, engine.tokenizer.chat_template()
    if wanted == "none" or (wanted == "auto" and CLOSING not in template):
        return None
    tail = engine.tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False)
    is_open = tail.rstrip().endswith(OPENING)
    return None if request.continue_final_message and not is_open else ReasoningParser(is_open=is_open)


def _check(tools: list[Tool]) -> None:
    if len(tools) > MAX_TOOLS:
        raise RequestError("tools", f"must hold at most {MAX_TOOLS} tools", len(tools))
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        name = tool.function.name
        if tool.type != "function":
            raise RequestError(f"tools[{i}].type", "must be function", tool.type)
        if not _NAME.fullmatch(name):
            raise RequestError(f"tools[{i}].function.name", "must be 1 to 64 letters, digits or any of _ . -", name)
        if tool.function.strict:
            raise RequestError(
                f"tools[{i}].function.strict", "must be false: calls are not bound to their schema", True
            )
        if name in seen:
            raise RequestError(f"tools[{i}].function.name", "must be another than those before", name)
        seen.add(name)


def _for_template(tool: Tool) -> dict[str, Any]:
    given = {"description": tool.function.description, "parameters": tool.function.parameters}
    return {
        "type": "function",
        "function": {"name": tool.function.name} | {name: value for name, value in given.items() if value is not None},
    }
