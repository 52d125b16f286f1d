"""Incremental parsing of JSON that a model generates, which may be invalid."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Final, TypeGuard

from llm_serving.core.files import is_unicode
from llm_serving.text.tool_parsers.base import Call, NotACallError

MAX_NAME_CHARS: Final = 256
_MARKS: Final = re.compile(r"[^\s0-9A-Za-z+\-.,:]")
_HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
MAX_HEAD_CHARS: Final = MAX_NAME_CHARS + 128
_IN_STRING: Final = re.compile(r'["\\]')


class JsonEnd:
    """Finds the end of an object or array. It does not validate the content."""

    def __init__(self) -> None:
        self._at = 0
        self._closing: list[str] = []
        self._in_string = False

    def find(self, text: str, start: int = 0) -> int | None:
        """Return the index after the object or array at `start`, or None if it is incomplete. Skip leading white space.
        `text` must extend the text of the previous call. Raise NotACallError if it cannot become an object or array.
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
        """Index after the examined text. It is never within an escape sequence."""
        return self._at

    def _is_end(self, char: str) -> bool:
        if char == '"':
            self._in_string = not self._in_string
        elif char in "{[":
            self._closing.append("}" if char == "{" else "]")
        elif not self._closing or self._closing.pop() != char:
            raise NotACallError
        return not self._closing


class StreamedCall:
    """A call that is returned while the model writes its arguments, which begin at `start` and may be invalid JSON."""

    def __init__(self, name: str, start: int, call_id: str = "") -> None:
        self._name = name
        self._id = call_id
        self._start = self.end = start
        self._json = JsonEnd()
        self.is_whole = False
        """Whether `end` is final: after the closing brace, or before the first invalid bracket."""

    def read(self, body: str, *, ended: bool) -> Call:
        """Return the call generated so far. `body` must extend the text of the previous call of this method."""
        if not self.is_whole:
            try:
                end = self._json.find(body, self._start)
                self.is_whole = end is not None
                self.end = self._json.at if end is None else end
            except NotACallError:
                self.is_whole, self.end = True, self._json.at - 1
            if ended and not self.is_whole:
                self.end = len(body)
        return Call(self._name, body[self._start : self.end], self._id)


def streamed_call(body: str, start: int, names: Collection[str]) -> StreamedCall | None:
    """Return the call at `start` if its JSON begins with a name in `names`, then the arguments; otherwise None."""
    head = _HEAD.match(body[start : start + MAX_HEAD_CHARS])
    return StreamedCall(head[1], start + head.end()) if head is not None and head[1] in names else None


def parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise NotACallError from None


def call_of(value: Any) -> Call:
    """Return the call in an object with a name and `arguments` or `parameters`. Raise NotACallError otherwise."""
    if not isinstance(value, dict) or not is_name(name := value.get("name")):
        raise NotACallError
    given = value.get("arguments", value.get("parameters", {}))
    return Call(name, arguments_of(parsed(given) if isinstance(given, str) else given))


def arguments_of(value: Any) -> str:
    if value is not None and not isinstance(value, dict):
        raise NotACallError
    try:
        text = json.dumps(value or {}, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # infinite or NaN
        raise NotACallError from None
    return text if is_unicode(text) else json.dumps(value)


def is_name(name: object) -> TypeGuard[str]:
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and name.strip() == name and is_unicode(name)


def _refuse(name: str) -> Any:
    raise ValueError(name)
