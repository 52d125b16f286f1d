"""What the parsers of all tool formats share: calls, the text around them, and their rules as a grammar.

The rules of a format define `calls`, one or several calls, and `free`, any text whose calls match the rules. They
name the arguments of tool i as `@args0`, `@args1`, ... In `free`, a text that starts like a call must continue as
one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from llm_serving.core.enums import JsonWhitespaceName
from llm_serving.text.structured_output.grammars import WHITESPACES, literal

MAX_CALL_CHARS: Final = 2**18
"""A longer text behind an opening is no call."""
MAX_FALSE_OPENINGS: Final = 64
"""After so many openings without a call, an answer is taken as text."""

COMMON: Final = r"""
WS: /[ \n]{1,2}/
TEXT: /(?s:.+)/
"""


class Call(NamedTuple):
    """One call of a function, or its beginning, or with an empty name what goes on with the arguments of the last."""

    name: str
    arguments: str
    """A JSON object, as text; what the model makes of it where it is told as it is written."""


Part = str | Call
"""Part of a response: text, or a call of a tool."""


class NotACallError(Exception):
    """What stands behind an opening is none; it stays text."""


class Read(NamedTuple):
    """What stood behind an opening."""

    calls: list[Call]
    end: int
    """The index behind it."""
    goes_on: bool = False
    """Whether more may follow: further calls, or more of the last one's arguments. Nothing that was told changes."""


class CallReader(Protocol):
    """Reads what stands behind one opening."""

    def read(self, body: str, *, ended: bool) -> Read | None:
        """Looks at all there is behind the opening; every `body` begins with the one before.

        Args:
            body: The text.
            ended: Nothing will follow.

        Returns:
            The calls; None: more is needed. What it returns depends on the text alone, not on how often it was asked,
            and begins with what it returned for less of it.

        Raises:
            NotACallError: Whatever follows, this is no call.
        """


class ToolParser(Protocol):
    """Takes an answer apart as it comes; how it is cut into pieces changes nothing."""

    def add(self, text: str) -> list[Part]:
        """What has become certain by the next piece."""

    def flush(self) -> list[Part]:
        """What is left when the answer has ended; `add` is not called again."""


class MarkedCalls:
    """Calls that stand behind an opening each; what is no call is said as it stands, its opening too.

    White space between what is said and a call, and between calls, belongs to neither.

    Args:
        opening: Text before a call.
        reader: Makes what reads the text behind one opening.
        begins_open: Whether the answer begins behind an opening that is not written; what is no call then is text.
    """

    def __init__(self, opening: str, reader: Callable[[], CallReader], *, begins_open: bool = False) -> None:
        self._opening = opening
        self._make_reader = reader
        self._reader = reader() if begins_open else None
        self._opened_by = ""
        """What stands before `_text` where a reader reads it."""
        self._text = ""
        """Not yet told, or within a call."""
        self._num_calls = self._num_chars = 0
        """Calls of the present reader that were told, and how much of the last one's arguments."""
        self._num_false = 0
        self._spaces: list[str] = []
        """Said last, perhaps, in pieces, each of which is looked at once; dropped when a call follows."""
        self._has_called = False

    def add(self, text: str) -> list[Part]:
        self._text += text
        return self._take(ended=False)

    def flush(self) -> list[Part]:
        parts = self._take(ended=True)
        if self._spaces and not self._has_called:
            parts.append("".join(self._spaces))
        return _joined(parts)

    def _take(self, *, ended: bool) -> list[Part]:
        parts: list[Part] = []
        while self._step(parts, ended):
            pass
        return _joined(parts)

    def _step(self, parts: list[Part], ended: bool) -> bool:
        """Goes on by one opening or one call; False when more text is needed."""
        if self._reader is not None:
            return self._read(self._reader, parts, ended)
        start = self._text.find(self._opening) if self._num_false < MAX_FALSE_OPENINGS else -1
        if start >= 0:
            self._say(self._text[:start], parts)
            self._open(self._text[start + len(self._opening) :])
            return True
        kept = 0 if ended or self._num_false >= MAX_FALSE_OPENINGS else _overlap(self._text, self._opening)
        split = len(self._text) - kept
        self._say(self._text[:split], parts)
        self._text = self._text[split:]
        return False

    def _open(self, text: str) -> None:
        self._reader, self._opened_by, self._text = self._make_reader(), self._opening, text

    def _read(self, reader: CallReader, parts: list[Part], ended: bool) -> bool:
        try:
            body = self._text[: MAX_CALL_CHARS + 1]
            is_whole = len(body) == len(self._text)
            found = reader.read(body, ended=ended and is_whole)
            if found is None and (ended or len(body) > MAX_CALL_CHARS):
                raise NotACallError
        except NotACallError:
            self._num_false += 1
            self._say(self._opened_by, parts)
            self._reader = None
            return True
        if found is None:
            return False
        self._tell(found.calls, parts)
        if found.goes_on and is_whole:
            return False
        self._reader, self._text = None, self._text[found.end :]
        self._num_calls = self._num_chars = 0
        return True

    def _tell(self, calls: list[Call], parts: list[Part]) -> None:
        for index in range(max(self._num_calls - 1, 0), len(calls)):
            call = calls[index]
            if index >= self._num_calls:
                parts.append(call)
                self._num_calls = index + 1
            elif len(call.arguments) > self._num_chars:
                parts.append(Call("", call.arguments[self._num_chars :]))
            self._num_chars = len(call.arguments)
        self._has_called = True
        self._spaces = []

    def _say(self, text: str, parts: list[Part]) -> None:
        said = text.rstrip()
        if said:
            parts.append("".join([*self._spaces, said]))
            self._spaces = []
        if len(said) < len(text):
            self._spaces.append(text[len(said) :])


def _overlap(text: str, opening: str) -> int:
    """Most characters at the end of a text that an opening begins with."""
    longest = min(len(text), len(opening) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(opening[:length])), 0)


def _joined(parts: list[Part]) -> list[Part]:
    """With what is said in a row as one, and a call with what goes on with it."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, str) and isinstance(last, str):
            joined[-1] = last + part
        elif isinstance(part, Call) and isinstance(last, Call) and not part.name:
            joined[-1] = Call(last.name, last.arguments + part.arguments)
        else:
            joined.append(part)
    return joined


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
