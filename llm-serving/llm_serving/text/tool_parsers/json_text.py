"""Incremental parsing of JSON that a model generates, which may be invalid."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator
from typing import Any, Final, TypeGuard

from llm_serving.core.files import is_unicode
from llm_serving.text.tool_parsers.base import Call, CallSource, NotACallError, Reading

MAX_NAME_CHARS: Final = 256
_MARKS: Final = re.compile(r"[^\s0-9A-Za-z+\-.,:]")
_HEAD: Final = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
MAX_HEAD_CHARS: Final = MAX_NAME_CHARS + 128
_IN_STRING: Final = re.compile(r'["\\]')


class JsonScanner:
    """Finds the end of the object or array at the index `start`. It does not validate the content."""

    def __init__(self, start: int) -> None:
        self.at = start
        """Index after the examined text. It is never within an escape sequence."""
        self._closing: list[str] = []
        self._in_string = False

    def advance(self, text: str) -> bool:
        """Examine `text`, which must extend the text of the previous call. Return whether the object or array ends at
        the index `at`. Skip leading white space. Raise NotACallError if the text cannot become an object or array.
        """
        if not self._closing:
            self.at += len(text[self.at :]) - len(text[self.at :].lstrip())
            if self.at < len(text) and text[self.at] not in "{[":
                raise NotACallError
        while self.at < len(text):
            found = (_IN_STRING if self._in_string else _MARKS).search(text, self.at)
            if found is None:
                self.at = len(text)
            elif self._in_string and found[0] == "\\":
                if found.end() == len(text):
                    self.at = found.start()
                    return False
                self.at = found.end() + 1
            else:
                self.at = found.end()
                if self._is_end(found[0]):
                    return True
        return False

    def _is_end(self, char: str) -> bool:
        if char == '"':
            self._in_string = not self._in_string
        elif char in "{[":
            self._closing.append("}" if char == "{" else "]")
        elif not self._closing or self._closing.pop() != char:
            raise NotACallError
        return not self._closing


def json_value(source: CallSource) -> Generator[None, None, Any]:
    """Move past a JSON object or array, and return it."""
    start, scanner = source.at, JsonScanner(source.at)
    while not scanner.advance(source.body):
        yield None
    source.at = scanner.at
    return parsed(source.body[start : source.at])


def streamed_call(source: CallSource, name: str, call_id: str = "") -> Reading:
    """Read a call while the model writes its arguments, which may be invalid JSON. They end after the closing brace, or
    before the first invalid bracket.
    """
    call, scanner, is_whole = Call(name, "", call_id), JsonScanner(source.at), False
    while True:
        start = source.at
        try:
            is_whole = scanner.advance(source.body)
            source.at = scanner.at
        except NotACallError:
            is_whole, source.at = True, scanner.at - 1
        if source.ended and not is_whole:
            source.at = len(source.body)
        if source.at > start:
            yield call._replace(arguments=source.body[start : source.at])
            call = Call("", "")
        if is_whole:
            return
        yield None


def headed_call(source: CallSource, name: str, names: Collection[str], call_id: str = "") -> Reading:
    """Read the arguments of a call whose name precedes them. Only calls of the tools in `names` are streamed."""
    if name in names:
        yield from streamed_call(source, name, call_id)
    else:
        yield Call(name, arguments_of((yield from json_value(source))), call_id)


def object_call(source: CallSource, names: Collection[str], *, only_names: bool = False) -> Reading:
    """Read a call in a JSON object. It is streamed if the object begins with a name in `names` and the arguments.
    `only_names`: raise NotACallError for other names.
    """
    start, scanner, is_streamed = source.at, JsonScanner(source.at), False
    while True:
        head = None if is_streamed else _HEAD.match(source.body, start, start + MAX_HEAD_CHARS)
        if head is not None and head[1] in names:
            source.at, is_streamed = head.end(), True
            yield from streamed_call(source, head[1])
        if scanner.advance(source.body):
            break
        yield None
    source.at = scanner.at
    if not is_streamed:
        call = call_of(parsed(source.body[start : source.at]))
        if only_names and call.name not in names:
            raise NotACallError
        yield call


def parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise NotACallError from None


def call_of(value: Any, name_key: str = "name") -> Call:
    """Return the call in an object with `name_key` and `arguments` or `parameters`, or raise NotACallError."""
    if not isinstance(value, dict) or not is_name(name := value.get(name_key)):
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
