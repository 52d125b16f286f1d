"""The tools a conversation offers, and how its answers are taken apart."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Final

import msgspec

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.server.answer_form import AnswerForm, json_whitespace, refuse_others
from llm_serving.server.schemas import ChatCompletionRequest, Tool, ToolCallOfMessage
from llm_serving.server.thinking import Budget, ThoughtCounter
from llm_serving.text.output_parsers.chat_message import AnswerParser
from llm_serving.text.output_parsers.reasoning import CLOSING, OPENING, ReasoningParser
from llm_serving.text.structured_output.chat_grammar import Calls, answer_grammar, arguments_grammar
from llm_serving.text.tool_parsers import TOOL_FORMATS, Callee, Marks, ToolFormat, format_in

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_ID_CHARS: Final = string.ascii_letters + string.digits
_TAIL_TOKENS: Final = 16
"""Of a prompt, in which an opening that it ends with has room."""


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """Tools that the model may call."""

    schemas: dict[str, dict[str, Any]]
    """Name of each -> JSON schema of its arguments."""
    for_template: list[dict[str, Any]]
    format: ToolFormat
    callees: tuple[Callee, ...] = ()
    """Those that may be called."""
    must_call: bool = False
    """Whether an answer is calls alone."""
    most: int | None = None
    """Calls of an answer; None: any number."""

    @property
    def bound_by(self) -> str | None:
        """The field by which answers are bound to a form; None: they are not."""
        if self.must_call:
            return "tool_choice"
        return "tools" if any(each.strict for each in self.callees) else None

    def new_id(self, chance: Random) -> str:
        """An id for a call, drawn by `chance`."""
        return self.format.id_prefix + "".join(chance.choice(_ID_CHARS) for _ in range(self.format.id_chars))


def offered_tools(engine: AsyncEngine, request: ChatCompletionRequest) -> OfferedTools | None:
    """What the request offers; None: nothing, or nothing that may be called.

    Raises:
        RequestError: A tool or the choice among them breaks a rule, or the model's calls could not be read.
    """
    choice, chosen = _chosen(request)
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
        {tool.function.name: tool.function.parameters or {} for tool in request.tools},
        [_for_template(tool) for tool in request.tools],
        TOOL_FORMATS[name],
        tuple(
            Callee(tool.function.name, tool.function.parameters or {}, bool(tool.function.strict))
            for tool in request.tools
            if chosen in (None, tool.function.name)
        ),
        choice == "required",
        1 if chosen is not None or request.parallel_tool_calls is False else None,
    )


def bound_form(
    engine: AsyncEngine,
    request: ChatCompletionRequest,
    prompt: list[int],
    form: AnswerForm | None,
    offered: OfferedTools | None,
    budget: Budget | None = None,
) -> AnswerForm | None:
    """The form of the whole answer: what is thought, then what is called, or said in the form that is asked for.

    Raises:
        RequestError: A thought has a budget, and none can be told apart.
    """
    bound_by = None if offered is None else offered.bound_by
    if form is None and bound_by is None and budget is None:
        return None
    reasoning = _reasoning_parser(engine, request, prompt)
    if budget is not None and reasoning is None:
        raise RequestError(budget.field, "is not supported: the model's chat template shows no marks of thoughts")
    thinks_open = None if reasoning is None else reasoning.is_open
    calls = None if offered is None else Calls(offered.format, offered.callees, offered.must_call, offered.most)
    marks = Marks(engine.tokenizer.mark_id, json_whitespace(engine))
    most = None if budget is None else budget.num_tokens
    parts = [] if form is None else [form]
    if budget is not None:
        parts.append(AnswerForm(budget.field, lambda _: answer_grammar(None, None, thinks_open, marks, most)))
    if request.tools is not None and offered is not None:
        places = {tool.function.name: f"tools[{i}].function.parameters" for i, tool in enumerate(request.tools)}
        parts += [AnswerForm(places[each.name], partial(arguments_grammar, each)) for each in offered.callees]
    return AnswerForm(
        parts[0].field if form is not None or bound_by is None else bound_by,
        lambda whitespace: answer_grammar(
            None if form is None else form.make(whitespace), calls, thinks_open, marks, most
        ),
        parts,
        (lambda: 0) if form is None else form.size,
    )


def answer_parser(
    engine: AsyncEngine, request: ChatCompletionRequest, prompt: list[int], offered: OfferedTools | None
) -> AnswerParser | None:
    """What takes one answer of the request apart; None: all of it is text."""
    reasoning = _reasoning_parser(engine, request, prompt)
    if reasoning is None and offered is None:
        return None
    tools = None if offered is None else offered.format.create(offered.schemas)
    return AnswerParser(reasoning, tools, 1 if request.parallel_tool_calls is False else None)


def thought_counter(engine: AsyncEngine, request: ChatCompletionRequest, prompt: list[int]) -> ThoughtCounter | None:
    """What counts the tokens of one answer's thought; None: none is told apart, or no token of its own ends it."""
    reasoning, closing = _reasoning_parser(engine, request, prompt), engine.tokenizer.mark_id(CLOSING)
    if reasoning is None or closing is None:
        return None
    return ThoughtCounter(engine.tokenizer.mark_id(OPENING), closing, is_open=reasoning.is_open)


def plain_call(place: str, call: ToolCallOfMessage) -> dict[str, Any]:
    """What a chat template gets of a call in a message.

    Raises:
        RequestError: It calls no function, or its arguments are no JSON object.
    """
    if call.type != "function":
        raise RequestError(f"{place}.type", "must be function", call.type)
    arguments = arguments_of(f"{place}.function.arguments", call.function.arguments)
    plain = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return plain if call.id is None else {"id": call.id} | plain


def arguments_of(place: str, given: str | dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call in a message; an empty text has none.

    Raises:
        RequestError: They are no JSON object.
    """
    arguments: Any = given
    if isinstance(given, str):
        try:
            arguments = msgspec.json.decode(given or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(place, "must be a JSON object", given)
    return arguments


def tells_thoughts(engine: AsyncEngine) -> bool:
    """Whether what the model thinks is told apart from what it says."""
    wanted = engine.config.serving.reasoning_parser
    return wanted != "none" and (wanted != "auto" or CLOSING in engine.tokenizer.chat_template())


def _reasoning_parser(engine: AsyncEngine, request: ChatCompletionRequest, prompt: list[int]) -> ReasoningParser | None:
    if not tells_thoughts(engine):
        return None
    tail = engine.tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False)
    is_open = tail.rstrip().endswith(OPENING)
    return None if request.continue_final_message and not is_open else ReasoningParser(is_open=is_open)


def _chosen(request: ChatCompletionRequest) -> tuple[str, str | None]:
    """`tool_choice` as auto, none or required, and the one tool that is to be called; None: any."""
    choice = request.tool_choice
    if choice in (None, "auto", "none", "required"):
        if choice == "required" and not request.tools:
            raise RequestError("tool_choice", "must not be required without `tools`")
        return str(choice or "auto"), None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(choice, dict) or not isinstance(function, dict):
        rule = 'must be auto, none, required or {"type": "function", "function": {"name": ...}}'
        raise RequestError("tool_choice", rule, choice)
    refuse_others("tool_choice", choice, ("type", "function"))
    refuse_others("tool_choice.function", function, ("name",))
    names = [tool.function.name for tool in request.tools or ()]
    if function.get("name") not in names:
        raise RequestError("tool_choice.function.name", "must be that of one of `tools`", function.get("name"))
    return "required", str(function["name"])


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
        if name in seen:
            raise RequestError(f"tools[{i}].function.name", "must be another than those before", name)
        seen.add(name)


def _for_template(tool: Tool) -> dict[str, Any]:
    given = {"description": tool.function.description, "parameters": tool.function.parameters}
    return {
        "type": "function",
        "function": {"name": tool.function.name} | {name: value for name, value in given.items() if value is not None},
    }
