"""Answers of gpt-oss: messages, each with a header that names its channel and, for a call, the tool as recipient.

    <|channel|>analysis<|message|>reasoning<|end|><|start|>assistant<|channel|>final<|message|>text
    <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>

The recipient may also precede the channel. Text in `commentary` without a recipient is content, as in `final`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

from llm_serving.text.structured_output.grammars import literal
from llm_serving.text.tool_parsers import base
from llm_serving.text.tool_parsers.json_text import headed_call, is_name

NEXT: Final = "<|end|><|start|>assistant"
_MESSAGE: Final = "<|message|>"
_FUNCTIONS: Final = "functions."
_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
"""Texts that end a message. `<|start|>` and `<|channel|>` also begin the next header."""
_END: Final = re.compile("|".join(map(re.escape, _ENDS)))
_STARTS: Final = ("<|start|>", "<|channel|>", "<|constrain|>", _MESSAGE, "to=")
"""Texts with which a generated header may start. The prompt ends with `<|start|>assistant`, within a header."""
_HEADER_TOKEN: Final = re.compile(r"<\|(?:start|channel|constrain)\|>")
_WORDS: Final = re.compile(r"[\w\s.=/:\-]*")
_MAX_HEADER_CHARS: Final = 512
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_BETWEEN: Final = "\n\n"


class HarmonyParser(base.ToolParser):
    """Parses answers of gpt-oss.

    `names`: tools whose calls are returned while they are generated. Calls of other tools are returned when they are
    complete. If `names` is None, calls are returned as text. `thinks`: whether reasoning is returned as `Thought`
    instead of text. `in_thought`: whether the prompt ends with the header of a reasoning message.
    """

    def __init__(self, names: Collection[str] | None, *, thinks: bool = True, in_thought: bool = False) -> None:
        self._names = None if names is None else frozenset(names)
        self._thinks = thinks
        self._step = self._body if in_thought else self._header
        self._kind: type[str] | type[base.Thought] = base.Thought if in_thought and thinks else str
        self._begun: set[type] = set()
        self._is_new = False
        self._drops_spaces = False
        self._source: base.CallSource | None = None

    def _advance(self, parts: list[base.Part], ended: bool) -> bool:
        return self._step(parts, ended)

    def _header(self, parts: list[base.Part], ended: bool) -> bool:
        header, found, rest = self._text.partition(_MESSAGE)
        if found and len(header) <= _MAX_HEADER_CHARS and _may_be_header(header + _MESSAGE):
            self._text = rest
            self._open(header)
            return True
        may_be_header = not found and len(header) < _MAX_HEADER_CHARS + len(_MESSAGE) and _may_be_header(header)
        if may_be_header and not ended:
            return False
        if may_be_header and ("<" in header or (not header.strip() and self._begun)):
            self._text = ""
            return False
        self._emit(self._text[:1], parts)  # not a header, so it is text
        self._text, self._step = self._text[1:], self._body
        return True

    def _open(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        is_thought = channel is not None and channel[1] == "analysis"
        self._kind = base.Thought if is_thought and self._thinks else str
        self._is_new, self._drops_spaces, self._step = True, False, self._body
        to = "" if recipient is None else recipient[1]
        name = to if self._names is not None and to in self._names else to.removeprefix(_FUNCTIONS)
        if self._names is not None and is_name(name) and (name in self._names or name != to):
            self._source, self._step = base.CallSource(partial(_read, name, self._names)), self._call

    def _body(self, parts: list[base.Part], ended: bool) -> bool:
        found = _END.search(self._text)
        if found is not None:
            self._emit(self._text[: found.start()], parts)
            keeps = found[0] in _STARTS
            self._text, self._step = self._text[found.start() if keeps else found.end() :], self._header
            return True
        kept = 0 if ended else max(base.overlap(self._text, each) for each in _ENDS)
        split = len(self._text) - kept
        self._emit(self._text[:split], parts)
        self._text = self._text[split:]
        return False

    def _call(self, parts: list[base.Part], ended: bool) -> bool:
        """Read a call's arguments; if they are no JSON object, they become text. Return False if text is missing."""
        assert self._source is not None
        try:
            end = self._source.read(self._text, parts, ended=ended)
        except base.NotACallError:
            self._step = self._body
            return True
        if end is None:
            return False
        self._text, self._step = self._text[end:], self._body
        self._kind, self._is_new, self._drops_spaces = str, True, True
        return True

    def _emit(self, text: str, parts: list[base.Part]) -> None:
        if self._drops_spaces:
            text = text.lstrip()
        if not text:
            return
        if self._is_new and self._kind in self._begun:
            text = _BETWEEN + text
        self._is_new = self._drops_spaces = False
        self._begun.add(self._kind)
        parts.append(self._kind(text))


def _read(name: str, names: Collection[str], source: base.CallSource) -> base.Reading:
    yield from source.expect("{")
    yield from headed_call(source, name, names)


def _may_be_header(text: str) -> bool:
    stripped = text.lstrip()
    if not any(stripped.startswith(each) or each.startswith(stripped) for each in _STARTS):
        return False
    words, found, delimiter = _HEADER_TOKEN.sub(" ", stripped).partition("<")
    return _WORDS.fullmatch(words) is not None and (
        not found or any(each.startswith("<" + delimiter) for each in _STARTS)
    )


def rules(callees: Sequence[base.Callee], most: int | None, delimiters: base.Delimiters) -> str:
    """Return the grammar rules (see `base`). They allow one call, because the answer ends at `<|call|>`."""
    del most

    def call(index: int, callee: base.Callee) -> str:
        header = literal(f"commentary to={_FUNCTIONS}{callee.name}")
        return f"call{index}: {delimiters('<|channel|>')} {header} format? {delimiters(_MESSAGE)} @args{index}\n"

    return (
        "calls: call\n"
        "free: preamble? calls\n"
        f"preamble: {delimiters('<|channel|>commentary<|message|>')} preface\n"
        f"{delimiters.up_to('preface', NEXT)}"
        f'format: " "? {delimiters("<|constrain|>")} "json" | " json"\n'
        f"{base.any_call(callees, call)}"
    )
