"""Sections of named rows: `request_classes`, `api_keys`.

A section that is given replaces the default rows as a whole; `--set section.row.key=value` changes single keys of
whichever rows there are, or adds a row.
"""

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llm_serving.config.schema import ROW_NAME, TABLES
from llm_serving.config.yaml_reader import Located, plain
from llm_serving.errors import ConfigError, shorten


@dataclass
class Row:
    """The keys given in one row, typed, and where they were written; `null` gives nothing."""

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def source_of(self, key: str) -> str:
        return self.sources.get(key, self.source)


class TableReader:
    """The rows of one section while they are put together."""

    def __init__(self, section: str) -> None:
        self.section = section
        self.source = "default"
        """Where the section begins."""
        self._table = TABLES[section]
        self._defaults = {
            item.name: item.default for item in dataclasses.fields(self._table.row_type) if item.name != "name"
        }
        self.rows: dict[str, Row] = {}
        for default in self._table.default:
            values = {key: value for key in self._defaults if (value := getattr(default, key)) is not None}
            self.rows[default.name] = Row("default", values)

    def read(self, located: Located) -> None:
        """Takes the rows of a file in place of the default ones.

        Raises:
            ConfigError: A name, a key or a value breaks its rule.
        """
        if located.value is None:
            return
        self.rows = {}
        self.source = located.where
        for name, content in located.items():
            self._add_row(name, content.where)
            for key, item in content.items():
                self.set(name, key, item)

    def set(self, name: str, key: str, item: Located) -> None:
        """Takes one value.

        Raises:
            ConfigError: The key is unknown, or its rule broken.
        """
        if name not in self.rows:
            self._add_row(name, item.where)
        row, rule = self.rows[name], self._table.rules.get(key)
        if rule is None:
            nearest = difflib.get_close_matches(key, list(self._table.rules), n=1, cutoff=0.0)[0]
            full = f"{self.section}.{name}.{nearest}"
            raise ConfigError(
                f"{item.where}: unknown key `{self.section}.{name}.{key}`; the nearest known one is `{full}`"
            )
        row.values.pop(key, None)
        row.sources[key] = item.where
        if item.value is None:
            return
        value = plain(item)
        try:
            row.values[key] = rule.parse(value)
        except ValueError:
            raise ConfigError(f"{item.where}: `{self.section}.{name}.{key}` {rule.broken_by(value)}") from None

    def build(self) -> tuple[Any, ...]:
        """The rows as the section's dataclass.

        Raises:
            ConfigError: A row lacks a key that has no default.
        """
        return tuple(self._build_row(name, row) for name, row in self.rows.items())

    def sources(self) -> Iterator[tuple[str, str]]:
        """("section.row.key", where its value came from) of every key of every row."""
        for name, row in self.rows.items():
            for key in self._table.rules:
                where = row.sources.get(key, "default")
                yield f"{self.section}.{name}.{key}", where

    def _add_row(self, name: str, where: str) -> None:
        try:
            ROW_NAME.parse(name)
        except ValueError:
            raise ConfigError(f"{where}: a name in `{self.section}` {ROW_NAME.broken_by(name)}") from None
        self.rows[name] = Row(where)

    def _build_row(self, name: str, row: Row) -> Any:
        for key, default in self._defaults.items():
            if default is dataclasses.MISSING and key not in row.values:
                others = [other for other in self.rows if other != name]
                raise ConfigError(
                    f"{row.source_of(key)}: `{self.section}.{name}.{key}` must be given{_other_rows(others)}"
                )
        return self._table.row_type(name=name, **row.values)


def _other_rows(names: Sequence[str]) -> str:
    return f"; the other rows are {', '.join(map(shorten, names[:8]))}" if names else ""
