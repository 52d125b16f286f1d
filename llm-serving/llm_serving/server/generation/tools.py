"""Tools and reasoning of a chat request: their fields, the grammar of the output, and the parser of the output."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, Final, NamedTuple

import msgspec

from llm_serving.config.sections.server import ServerConfig
from llm_serving.core.sampling_params import Whole
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.server.generation.structured_output import StructuredOutput, json_whitespace, refuse_unknown_keys
from llm_serving.server.protocols.openai.schemas import ChatCompletionRequest, Tool, ToolCallOfMessage
from llm_serving.text.answer_parser import (
    REASONING_FORMATS,
    AnswerParser,
    ReasoningFormat,
    ReasoningParser,
    reasoning_format_in,
)
from llm_serving.text.structured_output.chat_grammar import AnswerReasoning, Calls, answer_grammar, arguments_grammar
from llm_serving.text.tokenizer.tokenizer import Tokenizer
from llm_serving.text.tool_parsers import TOOL_FORMATS, Callee, Delimiters, format_in
from llm_serving.text.tool_parsers.harmony import HarmonyParser

MAX_BUDGET: Final = 2**24
_BUDGETS: Final = ("thinking_token_budget", "thinking_budget", "max_thinking_tokens")
BUDGET: Final = Whole(0, MAX_BUDGET)


class ReasoningTokenCounter:
    """Counts the reasoning tokens of one choice, without the delimiters around the reasoning. `opening` has the token
    ids of the opening delimiter, or none if the vocabulary lacks it. The token `closing` ends the reasoning. `is_open`
    says that the prompt ends with the opening delimiter, `reopens` that reasoning may start again after its end.
    """

    def __init__(self, opening: Sequence[int], closing: int, *, is_open: bool, reopens: bool = False) -> None:
        self._opening = list(opening)
        self._closing = closing
        self._reopens = reopens
        self._is_open = is_open
        self._is_closed = False
        self._tail: list[int] = []
        self.num_tokens = 0

    def add(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._is_open and token_id == self._closing:
                self._is_open, self._is_closed, self._tail = False, not self._reopens, []
            elif self._is_open:
                self.num_tokens += 1
            elif self._opening and not self._is_closed:
                self._tail = [*self._tail, token_id][-len(self._opening) :]
                self._is_open = self._tail == self._opening


class ReasoningBudget(NamedTuple):
    field: str
    num_tokens: int


def reasoning_budget(request: ChatCompletionRequest, config: ServerConfig) -> ReasoningBudget | None:
    given = [name for name in (*_BUDGETS, "reasoning_effort") if getattr(request, name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise RequestError(given[1], f"must not be given together with `{given[0]}`")
    [field] = given
    if field == "reasoning_effort":
        return ReasoningBudget(field, _effort_budget(request.reasoning_effort, config))
    return ReasoningBudget(field, BUDGET.checked(field, getattr(request, field)))


def _effort_budget(effort: str | None, config: ServerConfig) -> int:
    budgets = {
        "none": 0,
        "minimal": 0,
        "low": config.low_effort_token_budget,
        "medium": config.medium_effort_token_budget,
        "high": config.high_effort_token_budget,
    }
    if effort not in budgets:
        raise RequestError("reasoning_effort", f"must be one of {', '.join(budgets)}", effort)
    return budgets[effort]


MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_ID_CHARS: Final = string.ascii_letters + string.digits
_TAIL_TOKENS: Final = 16


@dataclass(frozen=True, slots=True)
class OfferedTools:
    schemas: dict[str, dict[str, Any]]
    for_template: list[dict[str, Any]]
    calls: Calls

    @property
    def constrained_by(self) -> str | None:
        """The request field that constrains the output: `tool_choice` (must call), `tools` (strict schema), or None."""
        if self.calls.must:
            return "tool_choice"
        return "tools" if any(each.strict for each in self.calls.callees) else None

    def new_id(self, rng: Random) -> str:
        form = self.calls.format
        return form.id_prefix + "".join(rng.choice(_ID_CHARS) for _ in range(form.id_chars))


def offered_tools(engine: AsyncEngine, request: ChatCompletionRequest) -> OfferedTools | None:
    """Return the tools that the model may call, or None. Raise RequestError if `tools` or `tool_choice` is invalid."""
    choice, chosen = _tool_choice(request)
    if not request.tools:
        return None
    _check_tools(request.tools)
    if choice == "none":
        return None
    configured = engine.config.serving.tool_call_parser
    name = format_in(engine.tokenizer.chat_template(with_tools=True)) if configured == "auto" else configured
    if name is None or name not in TOOL_FORMATS:
        why = "the model's chat template has no known format of tool calls" if name is None else "no parser is set"
        raise RequestError("tools", f"is not supported: {why} (serving_config.tool_call_parser: {configured})")
    schemas = {tool.function.name: tool.function.parameters or {} for tool in request.tools}
    callees = [
        Callee(tool.function.name, schemas[tool.function.name], bool(tool.function.strict))
        for tool in request.tools
        if chosen in (None, tool.function.name)
    ]
    most = 1 if chosen is not None or request.parallel_tool_calls is False else None
    calls = Calls(TOOL_FORMATS[name], callees, choice == "required", most)
    return OfferedTools(schemas, [_template_tool(tool) for tool in request.tools], calls)


def chat_output(
    engine: AsyncEngine,
    request: ChatCompletionRequest,
    reasoning: AnswerReasoning | None,
    content: StructuredOutput | None,
    offered: OfferedTools | None,
    budget: ReasoningBudget | None,
) -> StructuredOutput | None:
    """Return the structured output of a choice: reasoning within its budget, then tool calls or `content`. Return None
    if nothing constrains the output. Raise RequestError for a budget if the chat template does not mark reasoning.
    """
    constrained_by = None if offered is None else offered.constrained_by
    if content is None and constrained_by is None and budget is None:
        return None
    if budget is not None and (reasoning is None or reasoning.is_open is None):
        raise RequestError(budget.field, "is not supported: the model's chat template does not mark reasoning")
    calls = None if offered is None else offered.calls
    delimiters = Delimiters(engine.tokenizer.delimiter_id, json_whitespace(engine))
    if reasoning is not None and budget is not None:
        reasoning = replace(reasoning, budget=budget.num_tokens)
    parts = [] if content is None else [content]
    if budget is not None:
        parts.append(StructuredOutput(budget.field, lambda _: answer_grammar(None, None, reasoning, delimiters)))
    if request.tools is not None and calls is not None:
        fields = {tool.function.name: f"tools[{i}].function.parameters" for i, tool in enumerate(request.tools)}
        parts += [StructuredOutput(fields[each.name], partial(arguments_grammar, each)) for each in calls.callees]
    return StructuredOutput(
        parts[0].field if content is not None or constrained_by is None else constrained_by,
        lambda whitespace: answer_grammar(
            None if content is None else content.make(whitespace), calls, reasoning, delimiters
        ),
        parts,
        (lambda: 0) if content is None else content.size,
    )


def output_parser(
    request: ChatCompletionRequest, reasoning: AnswerReasoning | None, offered: OfferedTools | None
) -> AnswerParser | None:
    if reasoning is None and offered is None:
        return None
    most = 1 if request.parallel_tool_calls is False else None
    if reasoning is not None and reasoning.format.has_channels:
        names = None if offered is None else offered.schemas
        parser = HarmonyParser(names, thinks=reasoning.is_open is not None, in_thought=bool(reasoning.is_open))
        return AnswerParser(None, parser, most)
    thoughts = None if reasoning is None else ReasoningParser(reasoning.format, is_open=bool(reasoning.is_open))
    return AnswerParser(thoughts, None if offered is None else offered.calls.format.create(offered.schemas), most)


def reasoning_counter(tokenizer: Tokenizer, reasoning: AnswerReasoning | None) -> ReasoningTokenCounter | None:
    """Return a counter for one choice's reasoning tokens, or None if their format or its closing token is not known."""
    if reasoning is None or reasoning.is_open is None:
        return None
    form = reasoning.format
    closing = tokenizer.delimiter_id(Delimiters.parts(form.closing)[0])
    if closing is None:
        return None
    delimiters = [tokenizer.delimiter_id(form.opening)]
    opening = (
        tokenizer.encode(form.opening, False)
        if form.has_channels
        else [each for each in delimiters if each is not None]
    )
    return ReasoningTokenCounter(opening, closing, is_open=reasoning.is_open, reopens=form.has_channels)


def template_call(field: str, call: ToolCallOfMessage) -> dict[str, Any]:
    """Convert a message's tool call to the form that chat templates read. Raise RequestError if it is malformed."""
    if call.type != "function":
        raise RequestError(f"{field}.type", "must be function", call.type)
    arguments = arguments_of(f"{field}.function.arguments", call.function.arguments)
    plain = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return plain if call.id is None else {"id": call.id} | plain


def arguments_of(field: str, given: str | dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, {} for an empty text. Raise RequestError if they are not a JSON object."""
    arguments: Any = given
    if isinstance(given, str):
        try:
            arguments = msgspec.json.decode(given or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise RequestError(field, "must be a JSON object", given)
    return arguments


def reasoning_format(engine: AsyncEngine) -> ReasoningFormat | None:
    """Return the format in which reasoning is parsed. Return None if reasoning stays in the content."""
    configured = engine.config.serving.reasoning_parser
    if configured == "auto":
        return reasoning_format_in(engine.tokenizer.chat_template())
    return None if configured == "none" else REASONING_FORMATS[configured]


def shows_special_tokens(engine: AsyncEngine, offered: OfferedTools | None) -> bool:
    form = _delimiting_format(engine)
    return (offered is not None and offered.calls.format.special_tokens) or (form is not None and form.special_tokens)


def _delimiting_format(engine: AsyncEngine) -> ReasoningFormat | None:
    """Return the format of the delimiters around reasoning, or None if the output is not split at delimiters. gpt-oss
    also delimits the content (channels), so its format is returned even if reasoning stays in the content.
    """
    own = reasoning_format_in(engine.tokenizer.chat_template())
    return reasoning_format(engine) or (own if own is not None and own.has_channels else None)


def reasoning_of(engine: AsyncEngine, request: ChatCompletionRequest, prompt: list[int]) -> AnswerReasoning | None:
    """Return the format of the reasoning, and whether the prompt has already opened it. Return None if no delimiters
    around reasoning are parsed. Return None also if the answer continues a message whose reasoning has ended.
    """
    form = _delimiting_format(engine)
    if form is None:
        return None
    if reasoning_format(engine) is None:
        return None if request.continue_final_message else AnswerReasoning(form, None)
    is_open = form.is_open(engine.tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False))
    return None if request.continue_final_message and not is_open else AnswerReasoning(form, is_open)


def _tool_choice(request: ChatCompletionRequest) -> tuple[str, str | None]:
    """Return "auto", "none" or "required", and the name of the only tool that may be called, or None for any tool."""
    choice = request.tool_choice
    if choice in (None, "auto", "none", "required"):
        if choice == "required" and not request.tools:
            raise RequestError("tool_choice", "must be auto or none without `tools`", choice)
        return str(choice or "auto"), None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    if not isinstance(choice, dict) or not isinstance(function, dict):
        rule = 'must be auto, none, required or {"type": "function", "function": {"name": ...}}'
        raise RequestError("tool_choice", rule, choice)
    refuse_unknown_keys("tool_choice", choice, ("type", "function"))
    refuse_unknown_keys("tool_choice.function", function, ("name",))
    names = [tool.function.name for tool in request.tools or ()]
    if function.get("name") not in names:
        raise RequestError("tool_choice.function.name", "must be the name of one of `tools`", function.get("name"))
    return "required", str(function["name"])


def _check_tools(tools: list[Tool]) -> None:
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
            raise RequestError(f"tools[{i}].function.name", "must differ from the names of the other tools", name)
        seen.add(name)


def _template_tool(tool: Tool) -> dict[str, Any]:
    given = {"description": tool.function.description, "parameters": tool.function.parameters}
    return {
        "type": "function",
        "function": {"name": tool.function.name} | {name: value for name, value in given.items() if value is not None},
    }
