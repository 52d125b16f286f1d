"""Constraints over the vocabulary of the fake model: single bytes and pairs of letters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from llm_serving.text.structured_output import ConstraintCompiler, Grammar, TokenConstraint
from support.fake_runner import VOCAB_SIZE

END = 2
_PAIRS = itertools.product('{}[]":, 0123abcon', repeat=2)
_SINGLE = [bytes([byte]) for byte in range(32, 256)]
_TOKENS = [b"<pad>", b"<unk>", b"<end>", *_SINGLE, *("".join(each).encode() for each in _PAIRS)]


class LetterTokenizer:
    """A tokenizer of single bytes and pairs of letters with the methods that a grammar compiler needs."""

    vocab_size = VOCAB_SIZE
    special_token_ids = delimiter_ids = frozenset({0, 1, END})
    bos_token_id = None

    def token_bytes(self, token_id: int) -> bytes:
        return _TOKENS[token_id] if token_id < len(_TOKENS) else b""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens
        return [_TOKENS.index(bytes([byte])) for byte in text.encode()]


_COMPILER = ConstraintCompiler(LetterTokenizer(), frozenset({END}), VOCAB_SIZE)


def constraint_of(grammar: Grammar) -> TokenConstraint:
    return _COMPILER.compiled(grammar)


def text_of(token_ids: Iterable[int]) -> str:
    """Return the text of an answer without its EOS token."""
    return b"".join(_TOKENS[token_id] for token_id in token_ids if token_id != END).decode(errors="replace")
