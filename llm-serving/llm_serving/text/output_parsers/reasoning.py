"""What a model thinks before it answers, told apart from the answer."""

from __future__ import annotations

from typing import Final, NamedTuple

OPENING: Final = "<think>"
CLOSING: Final = "</think>"


class Split(NamedTuple):
    """What has become certain."""

    reasoning: str = ""
    answer: str = ""


class ReasoningParser:
    """Splits a text that begins with `<think>` at the first `</think>`; how it is cut into pieces changes nothing.

    White space around what is thought, and before the answer, belongs to neither. A text that does not begin so is all
    answer; one that never closes is all reasoning.

    Args:
        is_open: Whether the prompt ends with the opening.
    """

    def __init__(self, *, is_open: bool) -> None:
        self.is_open = is_open
        self._thinks: bool | None = True if is_open else None
        """None: that is not certain yet."""
        self._text = ""
        """Not yet told."""
        self._spaces: list[str] = []
        """The same where it is white space alone: a model may write nothing else for very long, and each piece of it is
        looked at once."""
        self._has_begun = False
        """Whether something was told since the last mark: white space before it is dropped."""

    def add(self, text: str) -> Split:
        """Takes the next piece."""
        if text.isspace() and not self._text and self._thinks is not False:
            self._spaces.append(text)
            return Split()
        return self._take(text, ended=False)

    def flush(self) -> Split:
        """What is left when the text has ended."""
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
            begun = self._text.lstrip()
            if OPENING.startswith(begun) and len(begun) < len(OPENING) and not ended:
                return Split()
            self._thinks = begun.startswith(OPENING)
            if self._thinks:
                self._text = begun.removeprefix(OPENING)
            else:
                self._has_begun = True  # an answer alone keeps its white space
        reasoning = ""
        if self._thinks:
            reasoning, found, rest = self._text.partition(CLOSING)
            if not found:
                return self._think(ended)
            reasoning = self._begun(reasoning).rstrip()
            self._thinks, self._has_begun, self._text = False, False, rest
        answer, self._text = self._begun(self._text), ""
        self._has_begun = self._has_begun or bool(answer)
        return Split(reasoning, answer)

    def _think(self, ended: bool) -> Split:
        """Tells of what may be followed by more; its last white space, or a part of the closing, may belong to none."""
        text = self._begun(self._text)
        kept = max((n for n in range(1, len(CLOSING)) if text.endswith(CLOSING[:n])), default=0)
        said = text if ended else text[: len(text) - kept].rstrip()
        self._has_begun = self._has_begun or bool(said)
        self._text = text[len(said) :]
        return Split(reasoning=said.rstrip() if ended else said)

    def _begun(self, text: str) -> str:
        return text if self._has_begun else text.lstrip()
