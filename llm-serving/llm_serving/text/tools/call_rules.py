"""Calls as rules of a grammar: what the formats have in common.

The rules of a format define `calls`, one call or several, and `free`, any answer whose calls keep to the rules. They
name the arguments of tool i as `@args0`, `@args1`, ... In `free`, what begins as a call must go on as one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llm_serving.core.choices import JsonWhitespaceName
from llm_serving.text.constraints.grammars import WHITESPACES, literal

COMMON: Final = r"""
WS: /[ \n]{1,2}/
TEXT: /(?s:.+)/
"""


@dataclass(frozen=True, slots=True)
class Callee:
    """A tool that may be called.

    Attributes:
        name: Letters, digits and some marks that mean nothing in a grammar.
        schema: JSON schema of its arguments.
        strict: Whether calls must keep to all of it.
    """

    name: str
    schema: dict[str, Any]
    strict: bool = False


class Marks:
    """Texts between the parts of an answer, as a grammar names them.

    Args:
        special_id: The id of a special token by its text; None: the text is no special token.
        whitespace: What may stand between the parts of JSON, see `grammars.json_grammar`.
    """

    def __init__(
        self,
        special_id: Callable[[str], int | None],
        whitespace: str = WHITESPACES[JsonWhitespaceName.SPACE],
    ) -> None:
        self.whitespace = whitespace
        self._special_id = special_id

    def are_special(self, text: str) -> bool:
        return self._special_id(text) is not None

    def __call__(self, text: str) -> str:
        token_id = self._special_id(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    def up_to(self, name: str, text: str) -> str:
        """A rule of this name for anything up to a mark, which is its end."""
        if self.are_special(text):
            return f"{name}: TEXT? {self(text)}\n"
        return f"{name}[lazy]: /(?s:.*){escaped(text)}/\n"


def escaped(text: str) -> str:
    """A text as a part of a regular expression in a grammar."""
    return re.escape(text).replace("/", "\\/").replace("\n", "\\n")


def repeated(rule: str, between: str, most: int | None) -> str:
    """A rule once or several times.

    Args:
        rule: What comes.
        between: What stands between two.
        most: Times; None: any.
    """
    times = "*" if most is None else f"{{0,{most - 1}}}"
    return rule if most == 1 else f"{rule} ({between} {rule}){times}"


def json_calls(callees: Sequence[Callee], arguments: str, marks: Marks) -> str:
    """Rules that define `call`: an object of the name and the arguments, under this key."""
    rules = [f"call: {any_of(callees)}\n"]
    for i, each in enumerate(callees):
        parts = ("{", literal("name"), ":", literal(each.name), ",", literal(arguments), ":")
        gap = "GAP? " if marks.whitespace else ""
        rules.append(f"call{i}: {''.join(f'{literal(part)} {gap}' for part in parts)}@args{i} {gap}{literal('}')}\n")
    if marks.whitespace:
        rules.append(f"GAP: /{marks.whitespace}/\n")
    return "".join(rules)


def any_of(callees: Sequence[Callee]) -> str:
    return " | ".join(f"call{i}" for i in range(len(callees)))
