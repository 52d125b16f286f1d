"""Rules that span the rows of the tables."""

import difflib
from collections.abc import Mapping
from typing import Final

from llm_serving.config.addresses import is_loopback
from llm_serving.config.schema import TABLES
from llm_serving.config.tables import TableReader
from llm_serving.config.values import Values
from llm_serving.core.request_class import class_of
from llm_serving.errors import ConfigError

ADDRESS: Final = "serving_config.server_ip"
ANONYMOUS: Final = "serving_config.anonymous_highest_class"


def check_rows(values: Values, tables: Mapping[str, TableReader]) -> None:
    """What one row may not say beside the others; what is merely surprising becomes a notice.

    Raises:
        ConfigError: With the place of the later of two rows that do not go together.
    """
    _check_request_classes(values, tables["request_classes"])
    _check_api_keys(tables["api_keys"], tables["request_classes"])
    _limit_anonymous_callers(values, tables)
    address = values["serving_config.server_ip"]
    if not tables["api_keys"].rows and not is_loopback(address):
        values.notices.append(
            f"{values.source('serving_config.server_ip')}: serving_config.server_ip: EVERYBODY who reaches {address} "
            f"may use this server: there are no api_keys; add some, or listen on 127.0.0.1"
        )


def _check_request_classes(values: Values, table: TableReader) -> None:
    classes = table.build()
    if not classes:
        raise ConfigError(f"{table.source}: `request_classes` must have at least one row, or be left out")
    _check_distinct(table, "rank")
    first = min(classes, key=lambda each: each.rank)
    if first.rank > 0:
        values.notices.append(
            f"{table.rows[first.name].source_of('rank')}: request_classes.{first.name}.rank: {first.rank} is the least "
            f"rank and above 0, so requests without a priority run in this class, the first"
        )
    factor = "scheduler_config.slo_refusal_factor"
    if values[factor] is not None and all(each.ttft_slo_s is None for each in classes):
        values.notices.append(f"{values.source(factor)}: {factor} has no effect: no class has a ttft_slo_s")


def _check_api_keys(table: TableReader, classes: TableReader) -> None:
    keys = table.build()
    _check_distinct(table, "key_sha256")
    for key in keys:
        if key.highest_class is not None:
            source = table.rows[key.name].source_of("highest_class")
            _check_class_name(f"api_keys.{key.name}.highest_class", key.highest_class, source, classes)


def _limit_anonymous_callers(values: Values, tables: Mapping[str, TableReader]) -> None:
    """A server that others than this machine's users reach lets nobody go before priority 0 unless it is told to."""
    given, classes = values[ANONYMOUS], tables["request_classes"]
    if given is not None:
        _check_class_name(ANONYMOUS, given, values.source(ANONYMOUS), classes)
    elif not tables["api_keys"].rows and not is_loopback(values[ADDRESS]):
        ordered = sorted(classes.build(), key=lambda each: each.rank)
        values.set(ANONYMOUS, class_of(0, ordered).name, f"{ADDRESS} is not a loopback address")


def _check_class_name(key: str, name: str, source: str, classes: TableReader) -> None:
    if name not in classes.rows:
        nearest = difflib.get_close_matches(name, list(classes.rows), n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"{source}: `{key}` must be the name of a class; the nearest known one is `{nearest}`. Given: {name}"
        )


def _check_distinct(table: TableReader, key: str) -> None:
    rule = TABLES[table.section].rules[key]
    first: dict[object, str] = {}
    for name, row in table.rows.items():
        value = row.values[key]
        other = first.setdefault(value, name)
        if other != name:
            given = f". Given: {value}" if rule.shows_value else ""
            raise ConfigError(
                f"{row.source_of(key)}: `{table.section}.{name}.{key}` must differ from that of `{other}` at "
                f"{table.rows[other].source_of(key)}{given}"
            )
