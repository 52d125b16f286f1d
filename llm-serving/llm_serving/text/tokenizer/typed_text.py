"""Special tokens in texts of users, as characters: `<|im_end|>` in a message ends no message.

A chat template mixes texts of users with control tokens. So each special token in a message gets a mark after its
first character before the template is rendered. The prompt is split at the marks, and the parts, none of which
contains a whole special token of a user, are tokenized one by one. Clients cannot know the mark, which is random.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

Encode = Callable[[str, bool], list[int]]

_FILLERS: Final = ("", "\n", "a")
"""Texts between a special token and a part, tried in order, because some vocabularies put a space there."""


class TypedText:
    """Marks special tokens in messages, and tokenizes the marked prompt.

    Args:
        encode: Tokenizes a text; the second argument adds the special tokens that the model expects.
        special: Text -> id of the special tokens that `encode` recognises.
    """

    def __init__(self, encode: Encode, special: Mapping[str, int], token_bytes: Callable[[int], bytes]) -> None:
        self._encode, self._token_bytes = encode, token_bytes
        names = sorted((text for text in special if len(text) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, names))) if names else None
        self._context = next((text for text, token_id in special.items() if encode(text, False) == [token_id]), "")

    def mark(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """Return the messages with a mark in each special token outside roles, and the mark; empty: there are none."""
        mark = secrets.token_hex(16)
        marked = [
            {name: value if name == "role" else self._marked(value, mark) for name, value in message.items()}
            for message in messages
        ]
        return marked, mark if marked != [dict(message) for message in messages] else ""

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            while self._pattern is not None and self._pattern.search(value):  # again: special tokens may overlap
                value = self._pattern.sub(lambda found: _split(found[0], mark), value)
            return value
        if isinstance(value, Mapping):
            return {self._marked(name, mark): self._marked(each, mark) for name, each in value.items()}
        return [self._marked(each, mark) for each in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str, mark: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a rendered prompt with marks."""
        first, *others = text.split(mark)
        plain = self._encode(first, False)
        ids = [*plain, *itertools.chain.from_iterable(map(self._continued, others))]
        if not add_special_tokens:
            return ids
        whole = self._encode(first, True)
        at = next(at for at in range(len(whole) + 1) if whole[at : at + len(plain)] == plain)
        return [*whole[:at], *ids, *whole[at + len(plain) :]]

    def _continued(self, part: str) -> list[int]:
        """Return the token ids of a part that does not begin the text."""
        for filler in _FILLERS:
            before = self._encode(self._context + filler, False)
            whole = self._encode(self._context + filler + part, False)
            ids = whole[len(before) :]
            begins_alike = b"".join(map(self._token_bytes, ids[:1])).startswith(part[:1].encode()[:1])
            if whole[: len(before)] == before and begins_alike:
                return ids
        return self._encode(self._context + part, False)[1 if self._context else 0 :]


def _split(token: str, mark: str) -> str:
    return f"{token[0]}{mark}{token[1:]}"
