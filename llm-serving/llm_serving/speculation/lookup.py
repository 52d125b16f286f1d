"""Proposals by looking up: what followed where the same few tokens stood before.

Saxena, "Prompt Lookup Decoding" (2023), looks in the prompt and the answer so far; Hu et al., "SAM Decoding" (2024),
also in other texts. Here it is the newest place that counts, and it is followed as long as it tells the truth.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final

MAX_INDEXED_TOKENS: Final = 8192
"""Of a prompt, the newest so many are looked in."""

Place = tuple[Sequence[int], int]
"""A sequence of tokens and the index of one of them."""


class NgramIndex:
    """Where each `length` tokens in a row were followed by another one, the newest time."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._places: dict[tuple[int, ...], Place] = {}

    def find(self, tokens: Sequence[int]) -> Place | None:
        """The place of what followed when the last tokens stood somewhere before."""
        return self._places.get(tuple(tokens[-self.length :]))

    def add(self, tokens: Sequence[int], index: int) -> None:
        """Notes what token `index` follows; the sequence may grow, but what stands in it stays."""
        if index >= self.length:
            self._places[tuple(tokens[index - self.length : index])] = tokens, index

    def discard(self, tokens: Sequence[int]) -> None:
        """Forgets all places in a sequence."""
        for index in range(self.length, len(tokens)):
            ngram = tuple(tokens[index - self.length : index])
            place = self._places.get(ngram)
            if place is not None and place[0] is tokens:
                del self._places[ngram]


class FinishedAnswers:
    """The newest answers of each namespace, together at most `max_tokens` long; nobody sees those of another."""

    def __init__(self, length: int, max_tokens: int) -> None:
        self._length = length
        self._max_tokens = max_tokens
        self._indices: OrderedDict[str, NgramIndex] = OrderedDict()
        self._answers: deque[tuple[str, Sequence[int]]] = deque()
        self.num_tokens = 0

    def find(self, namespace: str, tokens: Sequence[int]) -> Place | None:
        """As `NgramIndex.find`, in the answers of a namespace."""
        index = self._indices.get(namespace)
        return None if index is None else index.find(tokens)

    def add(self, namespace: str, tokens: Sequence[int]) -> None:
        """Takes an answer; the oldest ones make room for it. One that is too long alone is left out."""
        if not self._length < len(tokens) <= self._max_tokens:
            return
        self.num_tokens += len(tokens)
        while self.num_tokens > self._max_tokens:
            oldest, forgotten = self._answers.popleft()
            self.num_tokens -= len(forgotten)
            index = self._indices[oldest]
            index.discard(forgotten)
            if not any(name == oldest for name, _ in self._answers):
                del self._indices[oldest]
        index = self._indices.setdefault(namespace, NgramIndex(self._length))
        for position in range(self._length, len(tokens)):
            index.add(tokens, position)
        self._answers.append((namespace, tokens))


class Lookup:
    """Guesses the tokens of one request."""

    def __init__(self, prompt_token_ids: Sequence[int], namespace: str, length: int, finished: FinishedAnswers) -> None:
        self._tokens = list(prompt_token_ids[-MAX_INDEXED_TOKENS:])
        self._namespace = namespace
        self._index = NgramIndex(length)
        self._finished = finished
        for position in range(length, len(self._tokens)):
            self._index.add(self._tokens, position)
        self._place = self._find()

    @property
    def has_guess(self) -> bool:
        return self._place is not None

    def guess(self, count: int) -> list[int]:
        """At most `count` tokens that may follow."""
        if self._place is None:
            return []
        tokens, index = self._place
        return list(tokens[index : index + count])

    def append(self, token_id: int) -> bool:
        """Takes the token that did follow; returns whether it had been guessed."""
        place = self._place
        right = place is not None and place[0][place[1]] == token_id
        self._tokens.append(token_id)
        if right and place is not None and place[1] + 1 < len(place[0]):
            self._place = place[0], place[1] + 1
        else:
            self._place = self._find()
        self._index.add(self._tokens, len(self._tokens) - 1)
        return right

    def _find(self) -> Place | None:
        return self._index.find(self._tokens) or self._finished.find(self._namespace, self._tokens)
