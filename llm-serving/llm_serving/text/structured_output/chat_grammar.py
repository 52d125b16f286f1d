"""Grammars of chat answers: optional reasoning, then text, structured output or tool calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from llm_serving.text.answer_parser import ReasoningFormat
from llm_serving.text.structured_output.grammars import Grammar, GrammarError, json_grammar, lark_grammar
from llm_serving.text.tool_parsers import Callee, Delimiters, ToolFormat
from llm_serving.text.tool_parsers.base import COMMON


@dataclass(frozen=True, slots=True)
class Calls:
    """Up to `most` tool calls that an answer may contain (None: any number). `must`: the answer has only calls."""

    format: ToolFormat
    callees: Sequence[Callee]
    must: bool
    most: int | None


@dataclass(frozen=True, slots=True)
class AnswerReasoning:
    """The reasoning before an answer, of up to `budget` tokens. `is_open`: whether the prompt ends with the opening
    delimiter, or None if the answer has no reasoning.
    """

    format: ReasoningFormat
    is_open: bool | None
    budget: int | None = None


def answer_grammar(
    form: Grammar | None, calls: Calls | None, reasoning: AnswerReasoning | None, delimiters: Delimiters
) -> Grammar:
    """Return the grammar of an answer. `form`: grammar of the response format, or None to allow any text."""
    if form is not None and calls is None and reasoning is None:
        return form
    content = "TEXT?" if form is None else "@form"
    plain = "" if reasoning is not None and reasoning.format.has_channels else content
    if calls is None:
        options = [plain, _framed(content, reasoning, delimiters)]
    elif calls.must:
        options = ["calls"]
    else:
        options = [*(["free"] if form is None else ["calls", plain]), _framed(content, reasoning, delimiters)]
    body = " | ".join(filter(None, options))
    text = f"start: {_thought(reasoning, delimiters)} body\nbody: {body}\n"
    named = {} if form is None else {"form": form}
    if reasoning is not None and reasoning.is_open is not None:
        text += _thought_rule(reasoning, delimiters)
    if calls is not None:
        text += calls.format.rules(calls.callees, calls.most, delimiters)
        named |= {f"args{i}": arguments_grammar(each, delimiters.whitespace) for i, each in enumerate(calls.callees)}
    return lark_grammar(text + COMMON, **{name: each for name, each in named.items() if f"@{name}" in text})


def arguments_grammar(callee: Callee, whitespace: str) -> Grammar:
    """Return the grammar of a call's arguments as JSON. Raise GrammarError if a strict tool's schema is unsupported."""
    return json_grammar(json.dumps({"type": "object", **callee.schema}), whitespace, lenient=not callee.strict)


def _framed(content: str, reasoning: AnswerReasoning | None, delimiters: Delimiters) -> str:
    """Return the grammar term for `content` between the answer's delimiters. Return "" if none is needed: the format
    has no such delimiters, or they are ordinary text (not special tokens) and `content` matches any text.
    """
    if reasoning is None or not reasoning.format.answer[0]:
        return ""
    opening, closing = reasoning.format.answer
    if content == "TEXT?" and not (reasoning.format.has_channels or delimiters.are_special(opening)):
        return ""
    return f"{delimiters(opening)} WS? {content}" + (f" WS? {delimiters(closing)} WS?" if closing else "")


def _thought_rule(reasoning: AnswerReasoning, delimiters: Delimiters) -> str:
    closing, budget = reasoning.format.closing, reasoning.budget
    if budget is None:
        return delimiters.up_to("thought", closing)
    if not delimiters.are_special(delimiters.parts(closing)[0]):
        reason = f"the model has no token for {closing}, which a limit on the reasoning requires"
        raise GrammarError(f"cannot be enforced: {reason}; leave the field out")
    bounded = f"thinking[max_tokens={budget}]: /(?s:.*)/\n" if budget else ""
    return f"thought: {'thinking' if budget else ''} {delimiters(closing)}\n{bounded}"


def _thought(reasoning: AnswerReasoning | None, delimiters: Delimiters) -> str:
    if reasoning is None or reasoning.is_open is None:
        return ""
    return "thought WS?" if reasoning.is_open else f"({delimiters(reasoning.format.opening)} thought)? WS?"
