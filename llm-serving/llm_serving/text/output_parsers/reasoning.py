"""Separates a model's reasoning from its answer."""

from __future__ import annotations

from typing import Final, NamedTuple

from llm_serving.text.output_parsers.reasoning_formats import THINK, ReasoningFormat
from llm_serving.text.tool_parsers.base import overlap

_MAX_SPACES: Final = 64


class Split(NamedTuple):
    """Reasoning and answer text that later pieces cannot change."""

    reasoning: str = ""
    answer: str = ""


class ReasoningParser:
    """Splits streamed text at the delimiters of the format `form`, here called `<think>` and `</think>`.

    The result does not depend on how the text is divided into pieces. White space around the reasoning and before the
    answer is dropped. Text that does not start with `<think>` is all answer. Text that starts with `<think>` and has no
    `</think>` is all reasoning. `is_open`: whether the prompt ends with `<think>`, so that the text starts within the
    reasoning.
    """

    def __init__(self, form: ReasoningFormat = THINK, *, is_open: bool) -> None:
        self._opening, self._closing = form.opening, form.closing
        self._answer = _FramedAnswer(*form.answer) if form.answer[0] else None
        self._thinks: bool | None = True if is_open else None
        self._text = ""
        self._spaces: list[str] = []
        self._has_begun = False
        """Whether text was returned since the last `<think>` or `</think>`. Until then, white space is dropped."""

    def add(self, text: str) -> Split:
        """Add a piece of text, and return the text that later pieces cannot change."""
        if text.isspace() and not self._text and self._thinks is not False:
            self._spaces.append(text)
            return Split()
        return self._unframed(self._take(text, ended=False), ended=False)

    def flush(self) -> Split:
        return self._unframed(self._take("", ended=True), ended=True)

    def _unframed(self, split: Split, *, ended: bool) -> Split:
        if self._answer is None or (self._thinks is not False and not ended):
            return split
        return split._replace(answer=self._answer.add(split.answer, ended=ended))

    def _take(self, text: str, *, ended: bool) -> Split:
        self._text = "".join([*self._spaces, self._text, text])
        self._spaces = []
        split = self._split(ended)
        if self._text.isspace():
            self._spaces, self._text = [self._text], ""
        return split

    def _split(self, ended: bool) -> Split:
        if self._thinks is None:
            stripped = self._text.lstrip()
            if self._opening.startswith(stripped) and len(stripped) < len(self._opening) and not ended:
                return Split()
            self._thinks = stripped.startswith(self._opening)
            if self._thinks:
                self._text = stripped.removeprefix(self._opening)
            else:
                self._has_begun = True  # an answer without reasoning keeps its white space
        reasoning = ""
        if self._thinks:
            reasoning, found, rest = self._text.partition(self._closing)
            if not found:
                return self._think(ended)
            reasoning = self._strip_start(reasoning).rstrip()
            self._thinks, self._has_begun, self._text = False, False, rest
        answer, self._text = self._strip_start(self._text), ""
        self._has_begun = self._has_begun or bool(answer)
        return Split(reasoning, answer)

    def _think(self, ended: bool) -> Split:
        """Return reasoning text. Hold back trailing white space and a partial `</think>`."""
        text = self._strip_start(self._text)
        kept = overlap(text, self._closing)
        released = text if ended else text[: len(text) - kept].rstrip()
        self._has_begun = self._has_begun or bool(released)
        self._text = text[len(released) :]
        return Split(reasoning=released.rstrip() if ended else released)

    def _strip_start(self, text: str) -> str:
        return text if self._has_begun else text.lstrip()


class _FramedAnswer:
    """Removes the delimiters around an answer.

    One line break inside each delimiter is removed too, and all white space outside. The result does not depend on how
    the answer is divided into pieces. An answer that does not start with `opening` is returned unchanged.
    """

    def __init__(self, opening: str, closing: str) -> None:
        self._opening, self._closing = opening, closing
        self._step = self._begin
        self._text = ""

    def add(self, text: str, *, ended: bool) -> str:
        """Add a piece of text, and return the text that later pieces cannot change; with `ended`, all text."""
        self._text += text
        parts: list[str] = []
        while self._step(parts, ended):
            pass
        return "".join(parts)

    def _begin(self, parts: list[str], ended: bool) -> bool:
        stripped = self._text.lstrip()
        if stripped.startswith(self._opening):
            behind = stripped.removeprefix(self._opening)
            if not behind and not ended:
                return False
            self._text, self._step = behind.removeprefix("\n"), self._inside
            return True
        is_short = len(self._text) - len(stripped) <= _MAX_SPACES
        if is_short and self._opening.startswith(stripped) and not ended:
            return False
        self._step = self._rest
        return True

    def _inside(self, parts: list[str], ended: bool) -> bool:
        answer, found, rest = self._text.partition(self._closing)
        if found:
            parts.append(answer.removesuffix("\n"))
            self._text, self._step = rest, self._behind
            return True
        kept = 0 if ended else max(overlap(answer, each) for each in ("\n" + self._closing, self._closing))
        split = len(answer) - kept
        parts.append(answer[:split])
        self._text = answer[split:]
        return False

    def _behind(self, parts: list[str], ended: bool) -> bool:
        self._text = self._text.lstrip()
        if self._text:
            self._step = self._rest
        return bool(self._text)

    def _rest(self, parts: list[str], ended: bool) -> bool:
        parts.append(self._text)
        self._text = ""
        return False
