"""Proposals by looking up: what followed where the same few tokens stood before.

Saxena, "Prompt Lookup Decoding" (2023), looks in the prompt and the answer so far; Hu et al., "SAM Decoding" (2024),
also in other texts, where the longest match counts. Two lengths stand here for that: what followed twice `length`
tokens in finished answers, then what followed `length` in the text itself, at last what did in finished answers. Of
several places the newest counts, and it is followed as long as it tells the truth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from llm_serving.speculation.finished_answers import FinishedAnswers

MAX_INDEXED_TOKENS: Final = 8192
"""Of a prompt, the newest so many are looked in."""

Ngram = int
"""So many tokens in a row, `TOKEN_BITS` each: a number is made and found sooner than a tuple."""
TOKEN_BITS: Final = 32


class Lookup:
    """Guesses the tokens of one request. Runs for each token of all of them, so it makes little of each."""

    __slots__ = ("_finished", "_index", "_length", "_mask", "_namespace", "_ngram", "_places", "_source", "_tokens")

    def __init__(self, prompt_token_ids: Sequence[int], namespace: str, length: int, finished: FinishedAnswers) -> None:
        self._tokens = list(prompt_token_ids[-MAX_INDEXED_TOKENS:])
        self._namespace = namespace
        self._length = length
        self._finished = finished
        self._places = dict(_followed(self._tokens, length, length))
        """What `length` tokens in a row were followed by the newest time: the index of it."""
        self._mask = (1 << length * TOKEN_BITS) - 1
        self._ngram = ngram_of(self._tokens[-length:])
        """The newest tokens."""
        self._source: Sequence[int] | None = None
        self._index = 0
        """The guess is what stands there; none without a source."""
        self._find()

    @property
    def has_guess(self) -> bool:
        return self._source is not None

    def guess(self, count: int) -> list[int]:
        """At most `count` tokens that may follow; where they reach the newest one, what came last comes again."""
        if self._source is None:
            return []
        guessed = list(self._source[self._index : self._index + count])
        while len(guessed) < count and self._source is self._tokens:
            guessed += guessed[: count - len(guessed)]
        return guessed

    def append(self, token_id: int) -> bool:
        """Takes the token that did follow; returns whether it had been guessed."""
        source, tokens, before = self._source, self._tokens, self._ngram
        num_before = len(tokens)
        right = source is not None and source[self._index] == token_id
        tokens.append(token_id)
        self._ngram = (before << TOKEN_BITS | token_id) & self._mask
        if right and source is not None and self._index + 1 < len(source):
            self._index += 1
        else:
            self._find()
        if num_before >= self._length:
            self._places[before] = num_before
        return right

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes tokens that followed, without a look at what would have been guessed of each."""
        tokens, length = self._tokens, self._length
        start = max(0, len(tokens) - length)
        tokens += token_ids
        self._places.update(_followed(tokens[start:], length, start + length))
        self._ngram = ngram_of(tokens[-length:])
        self._find()

    def _find(self) -> None:
        self._source = None
        tokens, length = self._tokens, self._length
        found = self._finished.find(self._namespace, tokens, 2 * length)
        if found is None and len(tokens) >= length:
            if (index := self._places.get(self._ngram)) is not None:
                found = tokens, index
            else:
                found = self._finished.find(self._namespace, tokens, length)
        if found is not None:
            self._source, self._index = found


def ngram_of(tokens: Sequence[int]) -> Ngram:
    """These tokens as one number."""
    ngram = 0
    for token_id in tokens:
        ngram = ngram << TOKEN_BITS | token_id
    return ngram


def _followed(tokens: Sequence[int], length: int, first: int) -> Iterable[tuple[Ngram, int]]:
    """Each `length` tokens in a row that something follows, with numbers that count from `first`."""
    mask, ngram = (1 << length * TOKEN_BITS) - 1, ngram_of(tokens[: length - 1])
    ngrams = [ngram := (ngram << TOKEN_BITS | token_id) & mask for token_id in tokens[length - 1 : -1]]
    return zip(ngrams, range(first, first + len(ngrams)), strict=True)
