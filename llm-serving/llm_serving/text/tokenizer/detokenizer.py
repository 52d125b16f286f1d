"""Incremental detokenization, and the search for stop strings in the text."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from llm_serving.text.tokenizer.tokenizer import Tokenizer

_Utf8Decoder: Final = codecs.getincrementaldecoder("utf-8")
CONTEXT_TOKENS: Final = 4
"""Number of prompt tokens needed as context: one character may consist of four single-byte tokens."""


class Release(NamedTuple):
    text: str
    stop: str | None


class StopStringMatcher:
    """Cuts a text before its first complete stop string. The result does not depend on the division into pieces.

    Each stop string has a Knuth-Morris-Pratt automaton. Its state is the length of the longest prefix of the stop
    string with which the text so far ends. The end of the text is held back if it is a prefix of any stop string. If
    several stop strings end at the same character, the longest wins.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = sorted(set(stop), key=len, reverse=True)
        self._fallbacks = [_fallback_table(text) for text in self._stop]
        self._states = [0] * len(self._stop)
        self._first_chars = "".join({text[0] for text in self._stop})
        self.held = ""
        """End of the text that may begin a stop string."""

    def add(self, text: str) -> Release:
        """Add a piece. Return the text that cannot begin a stop string, and the first stop string if it is complete."""
        if not self.held and not any(char in text for char in self._first_chars):
            return Release(text, None)
        states = self._states
        for end, char in enumerate(text, 1):
            for i, stop in enumerate(self._stop):
                state = states[i]
                while state and stop[state] != char:
                    state = self._fallbacks[i][state - 1]
                states[i] = state = state + (stop[state] == char)
                if state == len(stop):
                    seen = self.held + text[:end]
                    return Release(seen[: len(seen) - len(stop)], stop)
        seen = self.held + text
        split = len(seen) - max(states)
        self.held = seen[split:]
        return Release(seen[:split], None)


def _fallback_table(text: str) -> list[int]:
    """Return, for each prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = table[length - 1]
        length += text[i] == text[length]
        table[i] = length
    return table


class _SilentDetokenizer:
    stop_string: str | None = None

    def add_token(self, token_id: int) -> str:
        return ""

    def add(self, token_ids: Iterable[int]) -> str:
        del token_ids
        return ""

    def flush(self) -> str:
        return ""


SILENT: Final = _SilentDetokenizer()


class IncrementalDetokenizer:
    """Decodes the output of one request in pieces. The pieces and the result of `flush()`, joined, are the whole text.
    Text is held back while the bytes of a character are incomplete, and while it may start a stop string. If the prompt
    ends within a character, the output completes it. A leading space that the tokenizer's decoder would strip is kept
    if the prompt has text, because the output continues that text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        *,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._bytes, self._texts = tokenizer.token_tables(skip_special_tokens)
        self._decoder = _Utf8Decoder(errors="replace")
        self._mid_character = False
        self._matcher = StopStringMatcher(stop) if stop else None
        self._include_stop = include_stop_str_in_output
        self._drop_space = tokenizer.strips_leading_space and not any(map(self._bytes_of, prompt_token_ids))
        self.stop_string: str | None = None
        # If the last token ends with a complete character, as in most prompts, the decoder needs no earlier tokens.
        if prompt_token_ids and not (0 <= (last := prompt_token_ids[-1]) < len(self._texts) and self._texts[last]):
            for token_id in prompt_token_ids[-CONTEXT_TOKENS:]:
                self._decode(token_id)

    def add_token(self, token_id: int) -> str:
        """Add a token, and return the text that later tokens cannot change."""
        text = None
        if not self._mid_character and 0 <= token_id < len(self._texts):
            text = self._texts[token_id]
        if text is None:
            text = self._decode(token_id)
        return self._release(text) if text and (self._drop_space or self._matcher is not None) else text

    def add(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self.add_token, token_ids))

    def flush(self) -> str:
        """Return the rest at the end of the output: U+FFFD for an incomplete character, or a partial stop string."""
        tail = self._decoder.decode(b"", final=True) if self._mid_character else ""
        self._mid_character = False
        text = self._release(tail) if tail else ""
        if self._matcher is not None and self.stop_string is None:
            text += self._matcher.held
            self._matcher = None
        return text

    def _release(self, text: str) -> str:
        if self._drop_space:
            self._drop_space = False
            text = text.removeprefix(" ")
        if self.stop_string is not None:
            return ""
        if self._matcher is None:
            return text
        text, self.stop_string = self._matcher.add(text)
        return text + self.stop_string if self.stop_string is not None and self._include_stop else text

    def _bytes_of(self, token_id: int) -> bytes:
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def _decode(self, token_id: int) -> str:
        text = self._decoder.decode(self._bytes_of(token_id))
        self._mid_character = bool(self._decoder.getstate()[0])
        return text


Detokenizer = IncrementalDetokenizer | _SilentDetokenizer
