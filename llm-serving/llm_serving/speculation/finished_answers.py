"""The newest finished answers, and where in them the same tokens stood before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final, Protocol, SupportsInt

import numpy as np
from numpy.typing import NDArray

_FACTOR: Final = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: multiples of it differ in their upper bits (Knuth, TAOCP 3, 6.4)."""
_BITS: Final = 64

Int64Array = NDArray[np.int64]


class Table(Protocol):
    """Of each slot an integer, 0 until another is put there."""

    def __getitem__(self, slot: int, /) -> SupportsInt: ...

    def __setitem__(self, slots: Int64Array, places: Int64Array, /) -> None: ...


def array(num_slots: int) -> Int64Array:
    """A table that takes memory for all of its slots."""
    return np.full(num_slots, 0, np.int64)


class FinishedAnswers:
    """The newest answers of each namespace, together at most `max_tokens` long; nobody sees those of another.

    What followed some tokens the newest time has one slot of a table by their hash, as in LZ4: who comes later
    overwrites it, and what is found is compared token by token. So answers are taken by a few operations on arrays, and
    none is needed to forget one.
    """

    def __init__(
        self,
        length: int,
        max_tokens: int,
        *,
        table: Callable[[int], Table] = array,
        salt: Callable[[str], int] = hash,
    ) -> None:
        """With what followed the newest time where `length` or twice as many tokens stood in a row.

        Args:
            length: Tokens.
            max_tokens: Of all answers.
            table: Makes one of so many slots.
            salt: Of a namespace, a number that others hardly have.
        """
        self._weights = [pow(_FACTOR, power, 1 << _BITS) for power in range(1, 2 * length + 1)]
        """By which the newest token is multiplied, the one before it, and so on."""
        self._max_tokens = max_tokens
        slot_bits = (2 * max_tokens).bit_length()
        self._shift = _BITS - slot_bits
        self._salt = salt
        self._slots = {each: table(1 << slot_bits) for each in (length, 2 * length)}
        """By length and hash: an answer's number, shifted by 32 bits, and the index of what followed; 0: nothing."""
        self._answers: dict[int, tuple[str, Sequence[int]]] = {}
        """By their numbers, oldest first."""
        self._num_answers = 0
        self.num_tokens = 0

    def find(self, namespace: str, tokens: Sequence[int], length: int) -> tuple[Sequence[int], int] | None:
        """An answer in which the last `length` of `tokens` stood, and the index of what followed there; or None."""
        if not self._answers or len(tokens) < length:
            return None
        newest = tokens[-length:]
        key = self._salt(namespace) + sum(map(int.__mul__, reversed(newest), self._weights))
        place = int(self._slots[length][(key & (1 << _BITS) - 1) >> self._shift])
        owner, answer = self._answers.get(place >> 32, ("", ()))
        index = place & 0xFFFFFFFF
        if index < length or owner != namespace or list(answer[index - length : index]) != newest:
            return None
        return answer, index

    def add(self, answers: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Takes answers, each with its namespace; the oldest ones make room for them.

        One that is too long alone is left out.
        """
        answers = [each for each in answers if len(each[1]) <= self._max_tokens]
        if not answers:
            return
        first = self._num_answers + 1
        self._num_answers += len(answers)
        self._answers.update(zip(range(first, self._num_answers + 1), answers, strict=True))
        lengths = [len(tokens) for _, tokens in answers]
        self.num_tokens += sum(lengths)
        while self.num_tokens > self._max_tokens:
            self.num_tokens -= len(self._answers.pop(next(iter(self._answers)))[1])
        self._index(answers, lengths, first)

    def _index(self, answers: Sequence[tuple[str, Sequence[int]]], lengths: list[int], first: int) -> None:
        """Has each token found by those before it; where these are not all of its answer, nobody finds it so."""
        num_tokens = sum(lengths)
        tokens = np.fromiter(chain.from_iterable([tokens for _, tokens in answers]), np.uint64, num_tokens)
        begins = np.cumsum(lengths) - lengths
        places = np.repeat((np.arange(first, first + len(answers)) << 32) - begins, lengths) + np.arange(num_tokens)
        salts = np.array([self._salt(namespace) & (1 << _BITS) - 1 for namespace, _ in answers], np.uint64)
        keys = np.repeat(salts, lengths)
        for length, weight in enumerate(self._weights, 1):
            keys[length:] += tokens[:-length] * np.uint64(weight)
            if (slots := self._slots.get(length)) is not None:
                slots[(keys[length:] >> np.uint64(self._shift)).astype(np.int64)] = places[length:]
