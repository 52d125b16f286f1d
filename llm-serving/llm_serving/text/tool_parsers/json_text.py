"""JSON of a model, which may be none, in a text that grows."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Final, TypeGuard

from llm_serving.core.files import is_unicode
from llm_serving.text.tool_parsers.base import Call, NotACallError

MAX_NAME_CHARS: Final = 256
_MARKS: Final = re.compile(r"[^\s0-9A-Za-z+\-.,:]")
"""What is to be looked at outside of strings."""
_HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_MAX_HEAD_CHARS: Final = MAX_NAME_CHARS + 128
_IN_STRING: Final = re.compile(r'["\\]')


class JsonEnd:
    """Finds where an object or array ends; what is inside is looked at only as far as that needs."""

    def __init__(self) -> None:
        self._at = 0
        """So far it has looked."""
        self._closing: list[str] = []
        self._in_string = False

    def find(self, text: str, start: int = 0) -> int | None:
        """The index behind the value that begins at `start`, behind white space; None: it goes on.

        Every `text` begins with the one before, and `start` is always the same.

        Raises:
            NotACallError: Whatever follows, this is no JSON of that kind.
        """
        if not self._closing:
            self._at = start + len(text[start:]) - len(text[start:].lstrip())
            if self._at < len(text) and text[self._at] not in "{[":
                raise NotACallError
        while self._at < len(text):
            found = (_IN_STRING if self._in_string else _MARKS).search(text, self._at)
            if found is None:
                self._at = len(text)
            elif self._in_string and found[0] == "\\":
                if found.end() == len(text):
                    self._at = found.start()
                    return None
                self._at = found.end() + 1
            else:
                self._at = found.end()
                if self._is_end(found[0]):
                    return self._at
        return None

    @property
    def at(self) -> int:
        """The index behind what has been looked at; no escape is cut there."""
        return self._at

    def _is_end(self, char: str) -> bool:
        """Takes a quotation mark or a bracket."""
        if char == '"':
            self._in_string = not self._in_string
        elif char in "{[":
            self._closing.append("}" if char == "{" else "]")
        elif not self._closing or self._closing.pop() != char:
            raise NotACallError
        return not self._closing


class WrittenCall:
    """A call that is told while its arguments, a JSON object, are written; whatever comes of them, it is one.

    Args:
        name: Of the tool.
        start: Index of the opening brace.
    """

    def __init__(self, name: str, start: int) -> None:
        self._name = name
        self._start = self.end = start
        self._json = JsonEnd()
        self.is_whole = False
        """Whether `end` is where the arguments end: behind their last brace, or before what no JSON has there."""

    def read(self, body: str, *, ended: bool) -> Call:
        """The call as far as it is written; every `body` begins with the one before."""
        if not self.is_whole:
            try:
                end = self._json.find(body, self._start)
                self.is_whole = end is not None
                self.end = self._json.at if end is None else end
            except NotACallError:
                self.is_whole, self.end = True, self._json.at - 1
            if ended and not self.is_whole:
                self.end = len(body)
        return Call(self._name, body[self._start : self.end])


def written_call(body: str, start: int, names: Collection[str]) -> WrittenCall | None:
    """The call that an object at an index begins to write, where the name of an offered tool stands before arguments;
    None: it does not, or not yet."""
    head = _HEAD.match(body[start : start + _MAX_HEAD_CHARS])
    return WrittenCall(head[1], start + head.end()) if head is not None and head[1] in names else None


def parsed(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        NotACallError: It is none.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise NotACallError from None


def call_of(value: Any) -> Call:
    """An object with a name and arguments, under one of the usual names.

    Raises:
        NotACallError: It is something else.
    """
    if not isinstance(value, dict) or not is_name(name := value.get("name")):
        raise NotACallError
    given = value.get("arguments", value.get("parameters", {}))
    return Call(name, arguments_of(parsed(given) if isinstance(given, str) else given))


def arguments_of(value: Any) -> str:
    """Raises:
    NotACallError: They are no object.
    """
    if value is not None and not isinstance(value, dict):
        raise NotACallError
    try:
        text = json.dumps(value or {}, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # numbers beyond all bounds
        raise NotACallError from None
    return text if is_unicode(text) else json.dumps(value)


def is_name(name: object) -> TypeGuard[str]:
    """Whether functions may be called so."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and name.strip() == name and is_unicode(name)


def _refuse(name: str) -> Any:
    raise ValueError(name)
