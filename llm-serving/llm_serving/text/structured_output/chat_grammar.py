"""The grammar of one answer of a conversation: what is thought, then what is said or called."""

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
    """Which calls an answer may consist of.

    Attributes:
        format: How the model writes them.
        callees: What may be called.
        must: Whether the answer is calls alone; otherwise it may be any text, or have the form that is asked for.
        most: Calls of an answer; None: any number.
    """

    format: ToolFormat
    callees: Sequence[Callee]
    must: bool
    most: int | None


def answer_grammar(
    form: Grammar | None, calls: Calls | None, thinks_open: bool | None, marks: Marks, budget: int | None = None
) -> Grammar:
    """What an answer may be.

    Args:
        form: Of what is said; None: any text.
        calls: What is called; None: nothing is.
        thinks_open: Whether the prompt has begun a thought, which the answer then ends; None: the model does not think.
        marks: Those of the model.
        budget: Tokens behind which a thought ends, if it does not end by itself; None: any number.

    Raises:
        GrammarError: The schema of a tool cannot be kept to, or the budget.
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
    """The arguments of one call, as JSON; of a tool that is not strict what cannot be kept to is left out of account.

    Raises:
        GrammarError: The schema cannot be kept to.
    """
    return json_grammar(json.dumps({"type": "object", **callee.schema}), whitespace, lenient=not callee.strict)


def _bounded_thought(budget: int, marks: Marks) -> str:
    """The rule of a thought that ends behind so many tokens."""
    if not marks.are_special(CLOSING):
        raise GrammarError(f"cannot be kept to: the model has no token for {CLOSING}")
    thinking = f"thinking[max_tokens={budget}]: /(?s:.*)/\n" if budget else ""
    return f"thought: {'thinking' if budget else ''} {marks(CLOSING)}\n{thinking}"


def _thought(thinks_open: bool | None, marks: Marks) -> str:
    if thinks_open is None:
        return ""
    return "thought WS?" if thinks_open else f"({marks(OPENING)} thought)? WS?"
