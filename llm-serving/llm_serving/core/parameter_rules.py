"""What the parameters of a request may be.

A rule takes what a client gave and returns the value that is computed with: a real number is rounded to float32 before
it is compared with its range, since float32 is what chooses tokens. What passes a rule can be used as it is.
"""

from __future__ import annotations

import math
from ctypes import c_float
from dataclasses import dataclass
from typing import Any, Final, Protocol

from llm_serving.errors import RequestError

MAX_INT32: Final = 2**31 - 1


def as_float32(value: float) -> float:
    """The nearest number of single precision; infinite beyond the largest one."""
    try:
        return c_float(value).value
    except OverflowError:  # an integer beyond every float
        return math.inf if value > 0 else -math.inf


class ParameterRule(Protocol):
    """One rule; `text` is worded to follow the name of a field: "must be an integer from 0 to 20"."""

    @property
    def text(self) -> str: ...

    def checked(self, field: str, value: Any) -> Any:
        """The value as it is used.

        Raises:
            RequestError: It breaks the rule; names `field`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Whole:
    low: int
    high: int = MAX_INT32
    optional: bool = False
    """Whether None, which stands for nothing, is allowed."""

    @property
    def text(self) -> str:
        return f"must be an integer from {self.low} to {self.high}"

    def checked(self, field: str, value: Any) -> Any:
        if value is None and self.optional:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not self.low <= value <= self.high:
            raise RequestError(field, self.text, value)
        return value


@dataclass(frozen=True, slots=True)
class Real:
    """A number of single precision."""

    low: float
    high: float
    above_low: bool = False
    """Whether `low` itself is outside."""

    @property
    def text(self) -> str:
        if self.above_low:
            return f"must be above {self.low} and at most {self.high}"
        return f"must be a number from {self.low} to {self.high}"

    def checked(self, field: str, value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise RequestError(field, self.text, value)
        used = as_float32(value)
        if not self.holds(used):
            rounded = f" in single precision, where {value!r} is {used!r}" if self.holds(value) else ""
            raise RequestError(field, self.text + rounded, value)
        return used

    def holds(self, value: float) -> bool:
        """Whether the number lies in the range; NaN does not."""
        low, high = as_float32(self.low), as_float32(self.high)
        return low <= value <= high and not (self.above_low and value == low)


@dataclass(frozen=True, slots=True)
class Flag:
    @property
    def text(self) -> str:
        return "must be true or false"

    def checked(self, field: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise RequestError(field, self.text, value)
        return value


@dataclass(frozen=True, slots=True)
class Texts:
    """A tuple of short, not empty texts."""

    max_count: int
    max_chars: int

    @property
    def text(self) -> str:
        return f"must hold at most {self.max_count} strings"

    def checked(self, field: str, value: Any) -> tuple[str, ...]:
        if len(value) > self.max_count:
            raise RequestError(field, self.text, len(value))
        for text in value:
            if not 1 <= len(text) <= self.max_chars:
                raise RequestError(field, f"each string must have 1 to {self.max_chars} characters", len(text))
        return tuple(value)


@dataclass(frozen=True, slots=True)
class GrammarText:
    """None, or a text. Whether it is a grammar is told by who compiles it."""

    @property
    def text(self) -> str:
        return "must be a grammar"

    def checked(self, field: str, value: Any) -> str | None:
        if value is not None and not (isinstance(value, str) and value):
            raise RequestError(field, self.text, value)
        return value


_TOKEN_ID: Final = Whole(0)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A tuple of token ids. Whether the vocabulary has them is checked by those who know it."""

    max_count: int

    @property
    def text(self) -> str:
        return f"must hold at most {self.max_count} ids"

    def checked(self, field: str, value: Any) -> tuple[int, ...]:
        if len(value) > self.max_count:
            raise RequestError(field, self.text, len(value))
        return tuple([_TOKEN_ID.checked(field, token_id) for token_id in value])


@dataclass(frozen=True, slots=True)
class SomeTokenIds:
    """None, which stands for all tokens, or a tuple of at least one id."""

    max_count: int

    @property
    def text(self) -> str:
        return f"must hold 1 to {self.max_count} ids"

    def checked(self, field: str, value: Any) -> tuple[int, ...] | None:
        if value is None:
            return None
        if not 1 <= len(value) <= self.max_count:
            raise RequestError(field, self.text, len(value))
        return tuple([_TOKEN_ID.checked(field, token_id) for token_id in value])


@dataclass(frozen=True, slots=True)
class TokenSequences:
    """A tuple of short, not empty sequences of token ids."""

    max_count: int
    max_len: int

    @property
    def text(self) -> str:
        return f"must hold at most {self.max_count} words"

    def checked(self, field: str, value: Any) -> tuple[tuple[int, ...], ...]:
        if len(value) > self.max_count:
            raise RequestError(field, self.text, len(value))
        for sequence in value:
            if not 1 <= len(sequence) <= self.max_len:
                raise RequestError(field, f"each word must have 1 to {self.max_len} tokens", len(sequence))
        return tuple([tuple([_TOKEN_ID.checked(field, token_id) for token_id in sequence]) for sequence in value])


@dataclass(frozen=True, slots=True)
class TokenBiases:
    """A tuple of (token id, number) pairs."""

    max_count: int
    bias: Real

    @property
    def text(self) -> str:
        return f"must hold at most {self.max_count} tokens"

    def checked(self, field: str, value: Any) -> tuple[tuple[int, float], ...]:
        if len(value) > self.max_count:
            raise RequestError(field, self.text, len(value))
        return tuple([(_TOKEN_ID.checked(field, token), self.bias.checked(field, bias)) for token, bias in value])
