"""Tokens that stand in a text as they are written: found before anything else is cut into pieces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

MAX_TOKEN_ID: Final = 2**24


@dataclass(frozen=True)
class AddedToken:
    """One token of `added_tokens_decoder`.

    Attributes:
        text: As it is written.
        special: It steers the model and is no text.
        lstrip: It takes the white space before it.
        rstrip: It takes the white space behind it.
        single_word: It is only found between spaces or at an end.
        normalized: It is found in the normalized text (only of `tokenizer.json`); None: unless it is special.
    """

    text: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool | None = None


def read_added_tokens(config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The tokens of `added_tokens_decoder` in a `tokenizer_config.json`, by id; what is malformed is left out."""
    tokens = config.get("added_tokens_decoder")
    added = {}
    for token_id, token in tokens.items() if isinstance(tokens, dict) else ():
        if not isinstance(token, dict) or not token_id.isdecimal() or int(token_id) >= MAX_TOKEN_ID:
            continue
        if isinstance(text := token.get("content"), str) and text:
            flags = {name: bool(token.get(name)) for name in ("special", "lstrip", "rstrip", "single_word")}
            normalized = token.get("normalized")
            added[int(token_id)] = AddedToken(
                text, **flags, normalized=normalized if isinstance(normalized, bool) else None
            )
    return added


class TokenSplitter:
    """Finds tokens in a text: from left to right, of several at one place the longest.

    Args:
        tokens: By their text.
    """

    def __init__(self, tokens: Mapping[str, AddedToken]) -> None:
        self._tokens = dict(tokens)
        names = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
        self._plain = not any(token.lstrip or token.rstrip or token.single_word for token in self._tokens.values())

    def split(self, text: str) -> list[tuple[str, bool]]:
        """The parts of a text, none of them empty, and whether each is a token."""
        if self._pattern is None:
            return [(text, False)] if text else []
        parts = [part for part in self._pattern.split(text) if part]
        if not self._plain:
            self._trim(parts)
        return [(part, part in self._tokens) for part in parts if part]

    def _trim(self, parts: list[str]) -> None:
        for i, part in enumerate(parts):
            token = self._tokens.get(part)
            if token is None:
                continue
            left, right = (parts[i - 1] if i else ""), (parts[i + 1] if i + 1 < len(parts) else "")
            if token.rstrip and right:
                parts[i + 1] = right.lstrip()
            if token.lstrip and left:
                parts[i - 1] = left.rstrip()
            # Inside a word it is no token: it joins the part beside it.
            if token.single_word and left and not left.endswith(" "):
                parts[i - 1], parts[i] = parts[i - 1] + part, ""
            elif token.single_word and right and not right.startswith(" "):
                parts[i + 1], parts[i] = part + parts[i + 1], ""
