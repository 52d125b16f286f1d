"""Tokenizes special tokens in texts of users as plain characters, so that `<|im_end|>` in a message does not end it.

Before the chat template is rendered, a random sentinel is inserted after the first character of each special token in a
message. The rendered prompt is split at the sentinels, and its parts are tokenized one by one.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

Encode = Callable[[str, bool], list[int]]

_FILLERS: Final = ("", "\n", "a")
"""Texts inserted between a special token and a part, tried in order, because some vocabularies add a space after it."""


class TypedText:
    """Tokenizes prompts so that special tokens which clients type in messages, such as `<|im_end|>`, remain plain text.
    Before the chat template is rendered, a random text (the sentinel) is inserted into each typed special token. It
    shows `encode` where to cut. `special`: text of each special token -> its id. `token_bytes(id)`: bytes of a token.
    """

    def __init__(self, encode: Encode, special: Mapping[str, int], token_bytes: Callable[[int], bytes]) -> None:
        self._encode, self._token_bytes = encode, token_bytes
        ends: dict[str, list[str]] = {}
        for text in sorted(text for text in special if len(text) > 1):
            ends.setdefault(re.escape(text[0]), []).append(re.escape(text[1:]))
        # Matches the first character of every special token, even if special tokens overlap. Each alternative starts
        # with a character, so that `re` skips all other characters fast.
        starts = [f"{first}(?={'|'.join(others)})" for first, others in ends.items()]
        self._pattern = re.compile("|".join(starts)) if starts else None
        self._context = next((text for text, token_id in special.items() if encode(text, False) == [token_id]), "")

    def insert_sentinels(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """Return messages with a sentinel in each special token except in `role`, and the sentinel ("" if unused)."""
        sentinel = secrets.token_hex(16)
        changed = [
            {
                name: value if name == "role" else self._with_sentinels(value, sentinel)
                for name, value in message.items()
            }
            for message in messages
        ]
        return changed, sentinel if changed != [dict(message) for message in messages] else ""

    def _with_sentinels(self, value: Any, sentinel: str) -> Any:
        if isinstance(value, str):
            return value if self._pattern is None else self._pattern.sub(lambda found: found[0] + sentinel, value)
        if isinstance(value, Mapping):
            return {
                self._with_sentinels(name, sentinel): self._with_sentinels(each, sentinel)
                for name, each in value.items()
            }
        return [self._with_sentinels(each, sentinel) for each in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str, sentinel: str, add_special_tokens: bool) -> list[int]:
        first, *others = text.split(sentinel)
        plain = self._encode(first, False)
        ids = [*plain, *itertools.chain.from_iterable(map(self._continued, others))]
        if not add_special_tokens:
            return ids
        whole = self._encode(first, True)
        at = next(at for at in range(len(whole) + 1) if whole[at : at + len(plain)] == plain)
        return [*whole[:at], *ids, *whole[at + len(plain) :]]

    def _continued(self, part: str) -> list[int]:
        for filler in _FILLERS:
            before = self._encode(self._context + filler, False)
            whole = self._encode(self._context + filler + part, False)
            ids = whole[len(before) :]
            has_same_start = b"".join(map(self._token_bytes, ids[:1])).startswith(part[:1].encode()[:1])
            if whole[: len(before)] == before and has_same_start:
                return ids
        return self._encode(self._context + part, False)[1 if self._context else 0 :]
