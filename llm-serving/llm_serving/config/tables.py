"""The sections of named rows, `request_classes` and `api_keys`. A section in a file replaces all default rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from llm_serving.config.rules import BOOLEAN, FRACTION, ROW_NAME, SHA256, Rule, integer, nearest, positive
from llm_serving.config.sections.server import is_loopback
from llm_serving.config.values import Values
from llm_serving.config.yaml_reader import Located, plain
from llm_serving.core.request_class import DEFAULT_CLASSES, MAX_PRIORITY, RequestClass, class_of
from llm_serving.errors import ConfigError, shorten


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    name: str
    key_sha256: str
    """SHA-256 of the API key in 64 hexadecimal digits, as `llm-serving hash-key` prints it. Required."""
    highest_class: str | None = None
    """Highest request class that the tenant may use. A request of a higher class, or with a priority before this
    class's rank, gets 403. null: no limit."""
    max_waiting: int | None = None
    """Maximum number of waiting requests of the tenant. Further ones get 429. null: only the limits of queue and
    class."""
    max_running: int | None = None
    """Maximum number of running requests of the tenant on all replicas together; further ones wait. null:
    `scheduler_config.max_running_per_tenant`."""
    admin: bool = False
    """True: clients with this key see and control the requests of all tenants."""
    max_requests_per_minute: int | None = None
    """Maximum number of requests per minute and in a burst. Further ones are refused with 429. null: no limit."""
    max_tokens_per_minute: int | None = None
    """Maximum number of tokens per minute: prompt tokens, and the tokens that a request may generate. Tokens that were
    not generated are credited back. Further requests are refused with 429. null: no limit."""


@dataclass(frozen=True)
class Table:
    row_type: type
    """Dataclass of a row. Its field `name` is the row's key in the YAML; fields without a default are required."""
    rules: Mapping[str, Rule]
    default: tuple[Any, ...] = ()


TABLES: Final[Mapping[str, Table]] = {
    "request_classes": Table(
        RequestClass,
        {
            "rank": integer(-MAX_PRIORITY, MAX_PRIORITY),
            "service_tier": ROW_NAME,
            "weight": integer(1, 10**6),
            "ageing_steps": integer(1, 10**9),
            "ttft_slo_s": positive("seconds"),
            "tpot_slo_s": positive("seconds"),
            "max_waiting": integer(1, 10**6),
            "max_running_share": FRACTION,
            "max_kv_share": FRACTION,
        },
        DEFAULT_CLASSES,
    ),
    "api_keys": Table(
        ApiKey,
        {
            "key_sha256": SHA256,
            "highest_class": ROW_NAME,
            "max_waiting": integer(1, 10**6),
            "max_running": integer(1, 10**6),
            "admin": BOOLEAN,
            "max_requests_per_minute": integer(1, 10**9),
            "max_tokens_per_minute": integer(1, 10**12),
        },
    ),
}


@dataclass
class Row:
    source: str
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def source_of(self, key: str) -> str:
        return self.sources.get(key, self.source)


class TableReader:
    def __init__(self, section: str) -> None:
        self.section = section
        self.source = "default"
        self._table = TABLES[section]
        self._defaults = {
            item.name: item.default for item in dataclasses.fields(self._table.row_type) if item.name != "name"
        }
        self.rows: dict[str, Row] = {}
        for default in self._table.default:
            values = {key: value for key in self._defaults if (value := getattr(default, key)) is not None}
            self.rows[default.name] = Row("default", values)

    def read(self, located: Located) -> None:
        """Replace the default rows by those of a file. Raise ConfigError if a name, key or value breaks its rule."""
        if located.value is None:
            return
        self.rows = {}
        self.source = located.where
        for name, content in located.items():
            self._add_row(name, content.where)
            for key, item in content.items():
                self.set(name, key, item)

    def set(self, name: str, key: str, item: Located) -> None:
        if name not in self.rows:
            self._add_row(name, item.where)
        row, rule = self.rows[name], self._table.rules.get(key)
        full = f"{self.section}.{name}.{key}"
        if rule is None:
            known = nearest(full, [f"{self.section}.{name}.{each}" for each in self._table.rules])
            raise ConfigError(f"{item.where}: unknown key `{full}`; {known}")
        row.values.pop(key, None)
        row.sources[key] = item.where
        if item.value is None:
            return
        row.values[key] = rule.value_of(f"`{full}`", plain(item), item.where)

    def build(self) -> tuple[Any, ...]:
        return tuple(self._build_row(name, row) for name, row in self.rows.items())

    def sources(self) -> Iterator[tuple[str, str]]:
        for name, row in self.rows.items():
            for key in self._table.rules:
                yield f"{self.section}.{name}.{key}", row.sources.get(key, "default")

    def check_distinct(self, key: str) -> None:
        rule = self._table.rules[key]
        first: dict[object, str] = {}
        for name, row in self.rows.items():
            other = name if row.values.get(key) is None else first.setdefault(row.values[key], name)
            if other != name:
                given = f". Given: {row.values[key]}" if rule.shows_value else ""
                raise ConfigError(
                    f"{row.source_of(key)}: `{self.section}.{name}.{key}` must differ from the value of `{other}` at "
                    f"{self.rows[other].source_of(key)}{given}"
                )

    def _add_row(self, name: str, where: str) -> None:
        ROW_NAME.value_of(f"a name in `{self.section}`", name, where)
        self.rows[name] = Row(where)

    def _build_row(self, name: str, row: Row) -> Any:
        for key, default in self._defaults.items():
            if default is dataclasses.MISSING and key not in row.values:
                others = [shorten(other) for other in self.rows if other != name]
                other_rows = f"; the other rows are {', '.join(others[:8])}" if others else ""
                raise ConfigError(f"{row.source_of(key)}: `{self.section}.{name}.{key}` must be given{other_rows}")
        return self._table.row_type(name=name, **row.values)


# --- checks ---------------------------------------------------------------------------------------------------------


def check_tables(values: Values, tables: Mapping[str, TableReader]) -> None:
    classes, keys = tables["request_classes"], tables["api_keys"]
    _check_request_classes(values, classes)
    for key in keys.build():
        if key.highest_class is not None:
            source = keys.rows[key.name].source_of("highest_class")
            _check_class_name(f"api_keys.{key.name}.highest_class", key.highest_class, source, classes)
    keys.check_distinct("key_sha256")
    _check_anonymous_clients(values, classes, has_keys=bool(keys.rows))


def _check_request_classes(values: Values, table: TableReader) -> None:
    classes = table.build()
    if not classes:
        raise ConfigError(f"{table.source}: `request_classes` must have at least one row, or be left out")
    table.check_distinct("rank")
    table.check_distinct("service_tier")
    first = min(classes, key=lambda row: row.rank)
    if first.rank > 0:
        values.notices.append(
            f"{table.rows[first.name].source_of('rank')}: request_classes.{first.name}.rank: {first.rank} is the least "
            f"rank and above 0, so requests without a priority run in this class, the first"
        )
    factor = "scheduler_config.slo_refusal_factor"
    if values[factor] is not None and all(row.ttft_slo_s is None for row in classes):
        values.notice(factor, "has no effect: no class has a ttft_slo_s")


def _check_anonymous_clients(values: Values, classes: TableReader, has_keys: bool) -> None:
    """Raise ConfigError if `anonymous_highest_class` is unknown. Set its default if a public server has no API keys."""
    name, address = "serving_config.anonymous_highest_class", "serving_config.server_ip"
    if values[name] is not None:
        _check_class_name(name, values[name], values.source(name), classes)
    if has_keys or is_loopback(values[address]):
        return
    if values[name] is None:
        ordered = sorted(classes.build(), key=lambda row: row.rank)
        values.set(name, class_of(0, ordered).name, f"{address} is not a loopback address")
    values.notice(
        address,
        f"EVERY client that reaches {values[address]} may use this server: there are no api_keys; add some, or listen "
        "on 127.0.0.1",
    )


def _check_class_name(key: str, name: str, source: str, classes: TableReader) -> None:
    if name not in classes.rows:
        rule = f"must be the name of a class; {nearest(name, list(classes.rows))}"
        raise ConfigError(f"{source}: `{key}` {rule}. Given: {name}")
