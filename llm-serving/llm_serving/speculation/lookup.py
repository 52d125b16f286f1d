"""Proposals by looking up: what followed where the same few tokens stood before.

Saxena, "Prompt Lookup Decoding" (2023), looks in the prompt and the answer so far; Hu et al., "SAM Decoding" (2024),
also in other texts. Here it is the newest place that counts, and it is followed as long as it tells the truth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

MAX_INDEXED_TOKENS: Final = 8192
"""Of a prompt, the newest so many are looked in."""

Ngram = int
"""So many tokens in a row, `TOKEN_BITS` each: a number is made and found sooner than a tuple."""
TOKEN_BITS: Final = 32
_NOWHERE: Final[Mapping[Ngram, int]] = MappingProxyType({})


class FinishedAnswers:
    """The newest answers of each namespace, together at most `max_tokens` long; nobody sees those of another."""

    def __init__(self, length: int, max_tokens: int) -> None:
        """With what followed the newest time where `length` tokens stood in a row."""
        self._length = length
        self._max_tokens = max_tokens
        self._places: dict[str, dict[Ngram, int]] = {}
        """Namespace -> where its n-grams were followed: the number of an answer, shifted by 32 bits, and the index in
        it. As numbers, which the garbage collector does not walk over."""
        self._answers: dict[int, tuple[str, Sequence[int]]] = {}
        """By their numbers, oldest first."""
        self._num_answers = 0
        self.num_tokens = 0

    def places(self, namespace: str) -> Mapping[Ngram, int]:
        """Where n-grams of a namespace were followed, for `at`; changes when answers come and go."""
        return self._places.get(namespace, _NOWHERE)

    def at(self, place: int) -> tuple[Sequence[int], int]:
        """An answer and the index of what followed in it."""
        return self._answers[place >> 32][1], place & 0xFFFFFFFF

    def add(self, namespace: str, tokens: Sequence[int]) -> None:
        """Takes an answer; the oldest ones make room for it. One that is too long alone is left out."""
        if not self._length < len(tokens) <= self._max_tokens:
            return
        self.num_tokens += len(tokens)
        while self.num_tokens > self._max_tokens:
            self._forget_oldest()
        number = self._num_answers
        self._num_answers += 1
        self._answers[number] = namespace, tokens
        first = number << 32 | self._length
        self._places.setdefault(namespace, {}).update(_followed(tokens, self._length, first))

    def _forget_oldest(self) -> None:
        number = next(iter(self._answers))
        namespace, tokens = self._answers.pop(number)
        self.num_tokens -= len(tokens)
        places = self._places[namespace]
        for ngram, _ in _followed(tokens, self._length, 0):
            if places.get(ngram, -1) >> 32 == number:
                del places[ngram]
        if not places:
            del self._places[namespace]


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

    def extend_unseen(self, token_ids: Sequence[int]) -> bool:
        """Takes tokens that followed where nothing was guessed, if nothing would have been of any of them.

        Returns:
            Whether that is so; otherwise nothing is taken, and `append` is to take them one by one.
        """
        assert self._source is None
        tokens, length = self._tokens, self._length
        num_before = len(tokens)
        if num_before < length:
            return False
        ngram, mask = self._ngram, self._mask
        ngrams = [ngram] + [ngram := (ngram << TOKEN_BITS | token_id) & mask for token_id in token_ids]
        for places in (self._places, self._finished.places(self._namespace)):
            if not places.keys().isdisjoint(ngrams[1:]):
                return False
        if len(set(ngrams)) < len(ngrams):
            return False
        tokens += token_ids
        self._ngram = ngrams.pop()
        self._places.update(zip(ngrams, range(num_before, len(tokens)), strict=True))
        return True

    def _find(self) -> None:
        self._source = None
        if len(self._tokens) < self._length:
            return
        if (index := self._places.get(self._ngram)) is not None:
            self._source, self._index = self._tokens, index
        elif (place := self._finished.places(self._namespace).get(self._ngram)) is not None:
            self._source, self._index = self._finished.at(place)


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
