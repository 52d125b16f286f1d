"""Finding stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Release(NamedTuple):
    """Text that is certain to stay, and the stop string that ended it."""

    text: str
    stop: str | None


class StopStringMatcher:
    """Cuts a text before the first stop string to be complete in it; how the text is cut into pieces changes nothing.

    Each stop string is followed by the automaton of Knuth, Morris and Pratt: its state is how many of its characters
    the text seen so far ends with. The longest state is what must be held back, since it may become a stop string.
    Of stop strings that end at the same character the longest counts.

    Args:
        stop: Non-empty strings.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = sorted(set(stop), key=len, reverse=True)
        self._fallbacks = [_fallback_table(text) for text in self._stop]
        self._states = [0] * len(self._stop)
        self._first_chars = "".join({text[0] for text in self._stop})
        self._held = ""

    @property
    def held(self) -> str:
        """Text given to `add` that was not released, because a stop string may begin with it."""
        return self._held

    def add(self, text: str) -> Release:
        """Takes the next piece; after a stop string was reported there must be no further one."""
        if not self._held and not any(char in text for char in self._first_chars):
            return Release(text, None)
        states = self._states
        for end, char in enumerate(text, 1):
            for i, stop in enumerate(self._stop):
                state = states[i]
                while state and stop[state] != char:
                    state = self._fallbacks[i][state - 1]
                states[i] = state = state + (stop[state] == char)
                if state == len(stop):
                    seen = self._held + text[:end]
                    return Release(seen[: len(seen) - len(stop)], stop)
        seen = self._held + text
        split = len(seen) - max(states)
        self._held = seen[split:]
        return Release(seen[:split], None)


def _fallback_table(text: str) -> list[int]:
    """For each prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = table[length - 1]
        length += text[i] == text[length]
        table[i] = length
    return table
