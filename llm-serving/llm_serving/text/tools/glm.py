"""GLM-4.5 and later: `<tool_call>name`, `<arg_key>k</arg_key><arg_value>v</arg_value>` for each, `</tool_call>`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Final

from llm_serving.text.tools.calls import Call, MarkedCalls, NotACallError, Read, ToolParser
from llm_serving.text.tools.json_text import arguments_of, is_name, parsed

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"
_VALUE: Final = "<arg_value>"
_VALUE_END: Final = "</arg_value>"
_ARGUMENT: Final = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


class _Reader:
    def __init__(self) -> None:
        self._at = 0

    def read(self, body: str, *, ended: bool) -> Read | None:
        del ended
        while True:
            value, closing = body.find(_VALUE, self._at), body.find(CLOSING, self._at)
            if closing >= 0 and (value < 0 or closing < value):
                return Read([_call(body[:closing])], closing + len(CLOSING))
            if value < 0:
                self._at = max(self._at, len(body) - len(CLOSING))
                return None
            end = body.find(_VALUE_END, value)  # a value may hold anything but its end
            if end < 0:
                return None
            self._at = end


def _call(body: str) -> Call:
    name, found, _ = body.partition("<arg_key>")
    if not is_name(name.strip()) or "<" in name:
        raise NotACallError
    arguments: dict[str, Any] = {}
    at = len(name) if found else len(body)
    while at < len(body):
        argument = _ARGUMENT.match(body, at)
        if argument is None:
            raise NotACallError
        arguments[argument[1].strip()] = _value(argument[2])
        at = argument.end()
    return Call(name.strip(), arguments_of(arguments))


def _value(text: str) -> Any:
    """Texts stand as they are, everything else as JSON."""
    try:
        value = parsed(text)
    except NotACallError:
        return text
    return text if isinstance(value, str) and json.dumps(value) != text.strip() else value


def create(names: Collection[str]) -> ToolParser:
    """A parser; calls are marked well enough without the names of the tools."""
    del names
    return MarkedCalls(OPENING, _Reader)
