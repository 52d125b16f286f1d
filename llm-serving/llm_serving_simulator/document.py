"""Files that people write by hand for the simulator: values by key, each checked with file, line, rule and value."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from llm_serving.config.yaml_reader import Located, plain
from llm_serving.errors import ConfigError, shorten

T = TypeVar("T")

KEYS_IN: Final = "docs/tuning.md"
"""Has the keys of all these files."""
MOST: Final = 1e12
"""Of any number; what is beyond is a slip of the pen, and no figures come of it."""
MOST_WHOLE: Final = 2**31 - 1

EXPONENT: Final = re.compile(r"[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
"""A number in JSON, and to everybody who writes one; YAML 1.1 takes it for a text where it has no point, or no sign."""


class TooLargeError(ValueError):
    """A number is above the largest that is allowed, which is the text."""


class Mapping:
    """The keys of one mapping; what nobody asks for is an error in the end."""

    def __init__(self, located: Located, name: str = "") -> None:
        """Raises ConfigError unless it is a mapping; `name` stands before its keys in errors."""
        self.where = located.where
        self._name = name
        self._items = {key: item for key, item in located.items() if item.value is not None}
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._items

    def take(self, key: str, parse: Callable[[Any], T], rule: str, default: T | None = None) -> T:
        """The value of a key.

        Args:
            key: Of the mapping.
            parse: Makes it of the plain value; raises ValueError or TypeError where it breaks the rule.
            rule: What must hold, worded to follow the name.
            default: Where the key is not given; None: it must be.

        Raises:
            ConfigError: The rule is broken.
        """
        self._known.append(key)
        item = self._items.get(key)
        if item is None:
            if default is None:
                raise ConfigError(f"{self.where}: `{self._full(key)}` must be given; it {rule}")
            return default
        value = plain(item)
        try:
            return parse(value)
        except TooLargeError as error:
            given = shorten(value)
            raise ConfigError(f"{item.where}: `{self._full(key)}` must be at most {error}. Given: {given}") from None
        except (ValueError, TypeError, LookupError):
            raise ConfigError(f"{item.where}: `{self._full(key)}` {rule}. Given: {shorten(value)}") from None

    def rows(self, key: str) -> Iterator[tuple[str, Located]]:
        """Keys and values of a mapping within; of one that is not given, none."""
        self._known.append(key)
        if (item := self._items.get(key)) is not None:
            yield from item.items()

    def where_of(self, key: str) -> str:
        return self._items[key].where if key in self._items else self.where

    def end(self) -> None:
        """Raises ConfigError for a key that was not asked for."""
        for key, item in self._items.items():
            if key not in self._known:
                nearest = difflib.get_close_matches(key, self._known, n=1, cutoff=0.0)
                hint = f"; the nearest known one is `{self._full(nearest[0])}`" if nearest else ""
                raise ConfigError(f"{item.where}: unknown key `{self._full(key)}`{hint}")

    def _full(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key


def number(least: float = 0.0, above: bool = False) -> Callable[[Any], float]:
    """Parses a number of at least `least`, or above it, and at most `MOST`."""

    def parse(value: Any) -> float:
        if isinstance(value, str) and EXPONENT.fullmatch(value):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError
        if not (value > least if above else value >= least) or value == float("inf"):
            raise ValueError
        if value > MOST:
            raise TooLargeError(f"{MOST:g}")
        return float(value)

    return parse


def whole(least: int = 0, most: int = MOST_WHOLE) -> Callable[[Any], int]:
    """Parses an integer of at least `least` and at most `most`."""

    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError
        if value < least:
            raise ValueError
        if value > most:
            raise TooLargeError(str(most))
        return value

    return parse


def text(value: Any) -> str:
    """Parses a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise TypeError
    return value


def flag(value: Any) -> bool:
    """Parses true or false."""
    if not isinstance(value, bool):
        raise TypeError
    return value


def one_of(names: Sequence[str]) -> Callable[[Any], str]:
    """Parses one of these words."""

    def parse(value: Any) -> str:
        if value not in names:
            raise ValueError
        return str(value)

    return parse
