"""Code that the parsers of all tool formats share: calls, the text around them, and their grammar rules.

The grammar rules of a format define `calls` and `free`. `calls` matches one or several calls. `free` matches text and
calls: after an opening delimiter, the text must continue as a call. `@args0`, `@args1`, ... are the grammars of the
tools' arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from llm_serving.core.enums import JsonWhitespaceName
from llm_serving.text.structured_output.grammars import WHITESPACES, GrammarError, literal

MAX_CALL_CHARS: Final = 2**18
"""Maximum characters of a call. A longer text after an opening delimiter is not a call."""
MAX_FALSE_OPENINGS: Final = 64
"""Number of opening delimiters without a call after which the rest of an answer is text."""

_SPACES: Final = re.compile(r"\s*")

COMMON: Final = r"""
WS: /[ \n]{1,2}/
TEXT: /(?s:.+)/
"""


class Call(NamedTuple):
    """A call of a function. An empty name means further arguments of the previous call."""

    name: str
    arguments: str
    """A JSON object as text. Streamed calls may contain the model's invalid JSON."""
    id: str = ""


class Thought(NamedTuple):
    text: str


Part = str | Thought | Call


class NotACallError(Exception):
    """The text after an opening delimiter is not a call, so it stays text."""


class CallSource:
    """The text after an opening delimiter, and the reader that takes calls from it.

    A reader is a generator. It yields each call, or further arguments of the last call, as soon as a longer text cannot
    change them, and None if it needs more text. It returns when no more calls follow, and raises NotACallError if the
    text is no call. Readers begin at the index `at` of `body`, and move `at` after the text of a call before they yield
    the call. `end`: index after the text of all yielded calls. `ended`: no more text follows `body`. `opening`: the
    delimiter, or "" if an answer begins without one.
    """

    def __init__(self, reader: Reader, opening: str = "") -> None:
        self.opening = opening
        self.body = ""
        self.ended = False
        self.at = self.end = 0
        self._calls = reader(self)

    def read(self, text: str, parts: list[Part], *, ended: bool) -> int | None:
        """Add the calls in `text` to `parts`. Return the index after all calls, or None if more text is needed. Raise
        NotACallError if there is no call. `text` must extend the text of the previous call of this method.
        """
        is_whole = len(text) <= MAX_CALL_CHARS
        self.body, self.ended = text[: MAX_CALL_CHARS + 1], ended and is_whole
        try:
            for call in self._calls:
                if call is not None:
                    parts.append(call)
                    self.end = self.at
                elif ended or not is_whole:
                    raise NotACallError
                else:
                    return None
        except NotACallError:
            if not self.end:
                raise
            return self.end
        return self.at

    def expect(self, *delimiters: str) -> Generator[None, None, str]:
        """Move past white space, and return the one of `delimiters` that follows. Raise NotACallError if none does."""
        longest = max(map(len, delimiters))
        while True:
            self.at = _end_of_spaces(self.body, self.at)
            rest = self.body[self.at : self.at + longest]
            for delimiter in delimiters:
                if rest.startswith(delimiter):
                    return delimiter
            if not any(delimiter.startswith(rest) for delimiter in delimiters):
                raise NotACallError
            yield None

    def take(self, *delimiters: str) -> Generator[None, None, str]:
        """Move past white space and one of `delimiters`, and return it. Raise NotACallError if another text follows."""
        delimiter = yield from self.expect(*delimiters)
        self.at += len(delimiter)
        return delimiter

    def skip(self, delimiter: str) -> Generator[None, None, None]:
        """Move past white space and `delimiter` if they follow. Some models omit closing delimiters."""
        while True:
            start = _end_of_spaces(self.body, self.at)
            rest = self.body[start : start + len(delimiter)]
            if self.ended or rest == delimiter or not delimiter.startswith(rest):
                break
            yield None
        if rest == delimiter:
            self.at = start + len(delimiter)


Reading = Generator[Call | None]
Reader = Callable[[CallSource], Reading]
Schemas = Mapping[str, Mapping[str, Any]]
"""Tool name -> JSON schema of its arguments."""


def _end_of_spaces(text: str, start: int) -> int:
    found = _SPACES.match(text, start)
    assert found is not None
    return found.end()


class ToolParser:
    """Parses an answer incrementally. The result does not depend on how the answer is divided into pieces."""

    _text = ""
    """Text that was added and not yet parsed."""

    def add(self, text: str) -> list[Part]:
        """Add a piece of text, and return the parts that later pieces cannot change."""
        self._text += text
        return self._take(ended=False)

    def flush(self) -> list[Part]:
        return self._take(ended=True)

    def _take(self, *, ended: bool) -> list[Part]:
        parts: list[Part] = []
        while self._advance(parts, ended):
            pass
        return joined(parts)

    def _advance(self, parts: list[Part], ended: bool) -> bool:
        """Move what is final of `_text` to `parts`. Return False if more text is needed."""
        raise NotImplementedError


class DelimitedCalls(ToolParser):
    """Parser of calls that follow one of `openings`, which are delimiters. If no call follows, the text is returned
    unchanged. `begins_open`: an answer may start with a call that has no opening.
    """

    def __init__(self, openings: Sequence[str], reader: Reader, *, begins_open: bool) -> None:
        self._openings = openings
        self._pattern = re.compile("|".join(map(re.escape, openings)))
        self._reader = reader
        self._source = CallSource(reader) if begins_open else None
        self._num_false = 0
        self._spaces: list[str] = []
        """White space after the returned text. It is dropped if a call follows."""
        self._has_called = False

    def flush(self) -> list[Part]:
        parts = super().flush()
        if self._spaces and not self._has_called:
            parts.append("".join(self._spaces))
        return joined(parts)

    def _advance(self, parts: list[Part], ended: bool) -> bool:
        if self._source is not None:
            return self._read(self._source, parts, ended)
        found = self._pattern.search(self._text) if self._num_false < MAX_FALSE_OPENINGS else None
        if found is not None:
            self._add_text(self._text[: found.start()], parts)
            self._source = CallSource(self._reader, found[0])
            self._text = self._text[found.end() :]
            return True
        waits = not ended and self._num_false < MAX_FALSE_OPENINGS
        kept = max(overlap(self._text, each) for each in self._openings) if waits else 0
        split = len(self._text) - kept
        self._add_text(self._text[:split], parts)
        self._text = self._text[split:]
        return False

    def _read(self, source: CallSource, parts: list[Part], ended: bool) -> bool:
        try:
            end = source.read(self._text, parts, ended=ended)
        except NotACallError:
            self._num_false += 1
            self._add_text(source.opening, parts)
            self._source = None
            return True
        if source.end:
            self._has_called, self._spaces = True, []
        if end is None:
            return False
        self._source, self._text = None, self._text[end:]
        return True

    def _add_text(self, text: str, parts: list[Part]) -> None:
        stripped = text.rstrip()
        if stripped:
            parts.append("".join([*self._spaces, stripped]))
            self._spaces = []
        if len(stripped) < len(text):
            self._spaces.append(text[len(stripped) :])


def delimited(
    openings: Sequence[str], read: Callable[[Schemas, CallSource], Reading], *, begins_open: bool = False
) -> Callable[[Schemas], DelimitedCalls]:
    """Return a function that creates a parser of one answer for tools with the given schemas."""
    return lambda schemas: DelimitedCalls(openings, partial(read, schemas), begins_open=begins_open)


def overlap(text: str, opening: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `opening`."""
    longest = min(len(text), len(opening) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(opening[:length])), 0)


def joined(parts: list[Part]) -> list[Part]:
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, str) and isinstance(last, str):
            joined[-1] = last + part
        elif isinstance(part, Thought) and isinstance(last, Thought):
            joined[-1] = Thought(last.text + part.text)
        elif isinstance(part, Call) and isinstance(last, Call) and not part.name:
            joined[-1] = last._replace(arguments=last.arguments + part.arguments)
        else:
            joined.append(part)
    return joined


@dataclass(frozen=True, slots=True)
class Callee:
    """A tool that may be called. `strict`: whether calls must match the whole JSON schema of its arguments."""

    name: str
    schema: dict[str, Any]
    strict: bool = False

    @property
    def required(self) -> list[Any]:
        return array_of(self.schema, "required")


def array_of(schema: Mapping[str, Any], key: str) -> list[Any]:
    """Return the array `key` of a JSON schema, or [] if it is missing. Raise GrammarError if it is no array."""
    found = schema.get(key, [])
    if not isinstance(found, list):
        raise GrammarError(f"cannot be compiled: {key} must be an array")
    return found


class Delimiters:
    """Creates the grammar terms that match delimiters. `special_id(text)`: id of the special token `text`, or None."""

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
        return " ".join(self._term(part) for part in self.parts(text))

    def _term(self, part: str) -> str:
        token_id = self._special_id(part)
        return literal(part) if token_id is None else f"<[{token_id}]>"

    @staticmethod
    def parts(text: str) -> list[str]:
        """Split a text before and after each `<|...|>`, `<|...>` and `<...|>`. Each part may be a special token."""
        return [part for part in re.split(r"""(<\|(?:\w+|")\|>|<\|\w+>|<\w+\|>)""", text) if part]

    def up_to(self, name: str, text: str) -> str:
        if self.are_special(self.parts(text)[0]):
            return f"{name}: TEXT? {self(text)}\n"
        return f"{name}[lazy]: /(?s:.*){escaped(text)}/\n"


def escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def repeated(rule: str, between: str, most: int | None) -> str:
    """Return a grammar term for `rule` one to `most` times (None: any number), separated by the term `between`."""
    times = "*" if most is None else f"{{0,{most - 1}}}"
    return rule if most == 1 else f"{rule} ({between} {rule}){times}"


def framed(openings: Sequence[str], inside: str, delimiters: Delimiters) -> str:
    """Return two grammar rules of a format in which an opening delimiter precedes the tool calls. The rule `calls`
    matches an answer that must call tools: the first of `openings`, then `inside`, the grammar term of the calls. The
    rule `free` matches any text; if one of `openings` occurs in it, `inside` must follow.
    """
    opened = [delimiters.up_to(f"opened{i}", each) for i, each in enumerate(openings)]
    names = " | ".join(f"opened{i}" for i in range(len(openings)))
    return f"calls: {delimiters(openings[0])} {inside}\nfree: (({names}) {inside})? TEXT?\n{''.join(opened)}"


def each_framed(opening: str, inside: str, most: int | None, delimiters: Delimiters) -> str:
    """Return the rules `calls` and `free` (see `framed`) of a format in which `opening` precedes each call."""
    times = "*" if most is None else f"{{0,{most}}}"
    calls = f"calls: {repeated('whole', 'WS?', most)}\nwhole: {delimiters(opening)} {inside}\n"
    return f"{calls}free: (opened {inside}){times} TEXT?\n{delimiters.up_to('opened', opening)}"


def json_calls(
    callees: Sequence[Callee], arguments: str, delimiters: Delimiters, *, name: str = "name", first: Sequence[str] = ()
) -> str:
    """Return the rules of `call`, a JSON object: the terms `first`, then the keys `name` and `arguments`."""
    gap = "GAP? " if delimiters.whitespace else ""

    def call(index: int, callee: Callee) -> str:
        parts = (literal(name), ":", literal(callee.name), ",", literal(arguments), ":")
        terms = (literal("{"), *first, *map(literal, parts))
        return f"call{index}: {''.join(f'{term} {gap}' for term in terms)}@args{index} {gap}{literal('}')}\n"

    return any_call(callees, call) + (f"GAP: /{delimiters.whitespace}/\n" if gap else "")


def any_call(callees: Sequence[Callee], rules_of: Callable[[int, Callee], str]) -> str:
    """Return the rule `call`, which matches a call of any tool, and the rules of each tool. `rules_of(index, callee)`
    returns the rule `call{index}`, and perhaps further rules.
    """
    names = " | ".join(f"call{i}" for i in range(len(callees)))
    return f"call: {names}\n" + "".join(rules_of(i, each) for i, each in enumerate(callees))
