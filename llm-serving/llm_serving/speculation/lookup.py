"""Proposals by looking up: what followed where the same few tokens stood before.

Saxena, "Prompt Lookup Decoding" (2023), looks in the prompt and the answer so far; Hu et al., "SAM Decoding" (2024),
also in other texts, where the longest match counts. Two lengths stand here for that: what followed twice `length`
tokens in finished answers, then what followed `length` in the text itself, at last what did in finished answers. Of
several places the newest counts, and it is followed as long as it tells the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llm_serving.speculation.finished_answers import FinishedAnswers

MAX_INDEXED_TOKENS: Final = 8192
"""Of a prompt, the newest so many are looked in."""

Ngram = int
"""So many tokens in a row, `TOKEN_BITS` each: a number is made and found sooner than a tuple."""
TOKEN_BITS: Final = 32


class Lookup:
    """Guesses the tokens of one request.

    `append` runs for each token of all that are followed and does little; what takes longer, a `look` does: it takes
    note of what followed what since the last one, and finds where the newest tokens stood before.
    """

    __slots__ = (
        "_finished",
        "_index",
        "_length",
        "_mask",
        "_namespace",
        "_ngram",
        "_num_noted",
        "_places",
        "_source",
        "_tokens",
    )

    def __init__(self, prompt_token_ids: Sequence[int], namespace: str, length: int, finished: FinishedAnswers) -> None:
        """Has no guess before the first look."""
        self._tokens = list(prompt_token_ids[-MAX_INDEXED_TOKENS:])
        self._namespace = namespace
        self._length = length
        self._finished = finished
        self._places: dict[Ngram, int] = {}
        """What `length` tokens in a row were followed by the newest time: the index of it."""
        self._mask = (1 << length * TOKEN_BITS) - 1
        self._ngram: Ngram = 0
        self._num_noted = 0
        """Tokens that the newest look has seen; `_ngram` is the last of them."""
        self._source: Sequence[int] | None = None
        self._index = 0
        """The guess is what stands there; none without a source."""

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
        """Takes the token that did follow; returns whether it had been guessed, else there is no guess any more."""
        source, index = self._source, self._index
        self._tokens.append(token_id)
        if source is None:
            return False
        right = source[index] == token_id
        if right and index + 1 < len(source):
            self._index = index + 1
        else:
            self._source = None
        return right

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes tokens that followed, without a look at what would have been guessed of each."""
        self._tokens += token_ids
        self._source = None

    def look(self) -> None:
        """Looks for what may follow the newest token."""
        self._source = None
        tokens, length = self._tokens, self._length
        if len(tokens) < length:
            return
        self._note()
        found = self._finished.find(self._namespace, tokens, 2 * length)
        if found is None:
            if (index := self._places.get(self._ngram)) is not None:
                found = tokens, index
            else:
                found = self._finished.find(self._namespace, tokens, length)
        if found is not None:
            self._source, self._index = found

    def _note(self) -> None:
        tokens, places, mask, ngram = self._tokens, self._places, self._mask, self._ngram
        start = self._num_noted
        if not start:
            start = self._length
            for token_id in tokens[:start]:
                ngram = ngram << TOKEN_BITS | token_id
        for index in range(start, len(tokens)):
            places[ngram] = index
            ngram = (ngram << TOKEN_BITS | tokens[index]) & mask
        self._ngram, self._num_noted = ngram, len(tokens)
