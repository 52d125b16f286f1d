"""The files of the simulator: YAML that people write, checked key by key, and output files that are replaced whole."""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from llm_serving.config.yaml_reader import Located, plain
from llm_serving.errors import ConfigError, shorten

T = TypeVar("T")

REFERENCE: Final = "docs/reference/file_formats.md"
"""The document that lists the keys of these files."""
MAX_NUMBER: Final = 1e12
MAX_INTEGER: Final = 2**31 - 1

EXPONENT: Final = re.compile(r"[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
"""A number such as `1e6`, which YAML 1.1 reads as a string."""


class TooLargeError(ValueError):
    """A number exceeds the maximum, which is the error's text."""


class YamlMapping:
    """One mapping of a YAML file, read key by key. `name`: prefix of its keys in errors. Raise ConfigError if it is
    none.
    """

    def __init__(self, located: Located, name: str = "") -> None:
        self.where = located.where
        self._name = name
        self._items = {key: item for key, item in located.items() if item.value is not None}
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._items

    def read(self, key: str, parse: Callable[[Any], T], rule: str, default: T | None = None) -> T:
        """Return the value of a key, or `default`; None: the key is required. `parse`: converts the plain value, or
        raises ValueError, TypeError or LookupError. `rule`: as it follows the key in a ConfigError: "must be ...".
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
        """Yield the keys and values of a nested mapping; none if it is missing."""
        self._known.append(key)
        if (item := self._items.get(key)) is not None:
            yield from item.items()

    def where_of(self, key: str) -> str:
        """Return file and line of a key; of the mapping where the key is missing."""
        return self._items[key].where if key in self._items else self.where

    def reject_unknown_keys(self) -> None:
        """Raise ConfigError for a key that `read` and `rows` were never called with."""
        for key, item in self._items.items():
            if key not in self._known:
                nearest = difflib.get_close_matches(key, self._known, n=1, cutoff=0.0)
                hint = f"; the nearest known one is `{self._full(nearest[0])}`" if nearest else ""
                raise ConfigError(f"{item.where}: unknown key `{self._full(key)}`{hint}")

    def _full(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key


def number(minimum: float = 0.0, exclusive: bool = False) -> Callable[[Any], float]:
    """Return a parser of numbers from `minimum` (excluded if `exclusive`) to `MAX_NUMBER`."""

    def parse(value: Any) -> float:
        if isinstance(value, str) and EXPONENT.fullmatch(value):
            value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError
        if not (value > minimum if exclusive else value >= minimum) or value == float("inf"):
            raise ValueError
        if value > MAX_NUMBER:
            raise TooLargeError(f"{MAX_NUMBER:g}")
        return float(value)

    return parse


def integer(minimum: int = 0, maximum: int = MAX_INTEGER) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError
        if value < minimum:
            raise ValueError
        if value > maximum:
            raise TooLargeError(str(maximum))
        return value

    return parse


def share(value: Any) -> float:
    parsed = number()(value)
    if parsed > 1:
        raise ValueError
    return parsed


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError
    return value


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def one_of(names: Sequence[str]) -> Callable[[Any], str]:
    return lambda value: str(names[names.index(value)])


def write_file(path: Path, content: str) -> None:
    """Write a file atomically, or raise ConfigError, and the old content stays. A symbolic link, a pipe, a device, and
    a file in a read-only folder are written in place.
    """
    try:
        is_regular = not path.is_symlink() and (path.is_file() or not path.exists())
        if is_regular and os.access(path.parent, os.W_OK):
            _replace(path, content)
        else:
            path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _replace(path: Path, content: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(content, encoding="utf-8")
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
