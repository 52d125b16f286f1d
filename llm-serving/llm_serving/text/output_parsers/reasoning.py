"""Separates a model's reasoning from its answer."""

from __future__ import annotations

from typing import Final, NamedTuple

OPENING: Final = "<think>"
CLOSING: Final = "</think>"


class Split(NamedTuple):
    """Reasoning and answer text that later pieces cannot change."""

    reasoning: str = ""
    answer: str = ""


class ReasoningParser:
    """Splits a text that starts with `<think>` at the first `</think>`, however it is divided into pieces. White space
    around the reasoning and before the answer is dropped. A text that does not start with `<think>` is all answer; a
    text without `</think>` is all reasoning. `is_open`: whether the prompt ends with `<think>`.
    """

    def __init__(self, *, is_open: bool) -> None:
        self.is_open = is_open
        self._thinks: bool | None = True if is_open else None
        self._text = ""
        self._spaces: list[str] = []
        """White space held back, in pieces so that each is examined only once."""
        self._has_begun = False
        """Whether text was returned since the last `<think>` or `</think>`. Before, leading white space is dropped."""

    def add(self, text: str) -> Split:
        """Add a piece of text, and return the text that later pieces cannot change."""
        if text.isspace() and not self._text and self._thinks is not False:
            self._spaces.append(text)
            return Split()
        return self._take(text, ended=False)

    def flush(self) -> Split:
        return self._take("", ended=True)

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
            if OPENING.startswith(stripped) and len(stripped) < len(OPENING) and not ended:
                return Split()
            self._thinks = stripped.startswith(OPENING)
            if self._thinks:
                self._text = stripped.removeprefix(OPENING)
            else:
                self._has_begun = True  # an answer without reasoning keeps its white space
        reasoning = ""
        if self._thinks:
            reasoning, found, rest = self._text.partition(CLOSING)
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
        kept = max((n for n in range(1, len(CLOSING)) if text.endswith(CLOSING[:n])), default=0)
        released = text if ended else text[: len(text) - kept].rstrip()
        self._has_begun = self._has_begun or bool(released)
        self._text = text[len(released) :]
        return Split(reasoning=released.rstrip() if ended else released)

    def _strip_start(self, text: str) -> str:
        return text if self._has_begun else text.lstrip()
