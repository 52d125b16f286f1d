"""Grammars of chat answers: optional reasoning, then text, structured output or tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from llm_serving.text.output_parsers.reasoning import CLOSING, OPENING
from llm_serving.text.structured_output.grammars import Grammar, GrammarError, json_grammar, lark_grammar
from llm_serving.text.tool_parsers import Callee, Marks, ToolFormat
from llm_serving.text.tool_parsers.base import COMMON


@dataclass(frozen=True, slots=True)
class Calls:
    """The tool calls that an answer may contain.

    Attributes:
        must: Whether the answer must consist of calls; otherwise it may also be text or the requested structured
            output.
        most: Maximum number of calls in an answer; None: unlimited.
    """

    format: ToolFormat
    callees: Sequence[Callee]
    must: bool
    most: int | None


def answer_grammar(
    form: Grammar | None, calls: Calls | None, thinks_open: bool | None, marks: Marks, budget: int | None = None
) -> Grammar:
    """Return the grammar of an answer. Raise GrammarError if the schema of a tool, or the budget, cannot be enforced.

    Args:
        form: Grammar of the text; None: any text.
        calls: Allowed tool calls; None: no calls.
        thinks_open: Whether the prompt ends with `<think>`; None: the model does not reason.
        marks: Special texts of the model, such as `</think>`.
        budget: Maximum number of reasoning tokens; None: unlimited.
    """
    if form is not None and calls is None and thinks_open is None:
        return form
    said = "TEXT?" if form is None else "@form"
    body = said if calls is None else "calls" if calls.must else "calls | @form" if form is not None else "free"
    text = f"start: {_thought(thinks_open, marks)} body\nbody: {body}\n"
    named = {} if form is None else {"form": form}
    if thinks_open is not None:
        text += marks.up_to("thought", CLOSING) if budget is None else _bounded_thought(budget, marks)
    if calls is not None:
        text += calls.format.rules(calls.callees, calls.most, marks)
        named |= {f"args{i}": arguments_grammar(each, marks.whitespace) for i, each in enumerate(calls.callees)}
    return lark_grammar(text + COMMON, **{name: each for name, each in named.items() if f"@{name}" in text})


def arguments_grammar(callee: Callee, whitespace: str) -> Grammar:
    """Return the grammar of a call's arguments as JSON. Raise GrammarError if a strict tool's schema is unsupported."""
    return json_grammar(json.dumps({"type": "object", **callee.schema}), whitespace, lenient=not callee.strict)


def _bounded_thought(budget: int, marks: Marks) -> str:
    """Return the grammar rule of a reasoning text with at most `budget` tokens."""
    if not marks.are_special(CLOSING):
        raise GrammarError(f"cannot be enforced: the model has no token for {CLOSING}")
    thinking = f"thinking[max_tokens={budget}]: /(?s:.*)/\n" if budget else ""
    return f"thought: {'thinking' if budget else ''} {marks(CLOSING)}\n{thinking}"


def _thought(thinks_open: bool | None, marks: Marks) -> str:
    if thinks_open is None:
        return ""
    return "thought WS?" if thinks_open else f"({marks(OPENING)} thought)? WS?"
