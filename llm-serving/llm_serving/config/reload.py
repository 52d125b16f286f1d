"""The keys of the YAML that a running server applies when it reloads the YAML."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from llm_serving.config.loader import load_config
from llm_serving.config.schema import OPTIONS, SECTIONS, TABLES, ServingConfig
from llm_serving.core.enums import PolicyName
from llm_serving.errors import ConfigError

RELOADABLE: Final = frozenset(name for name, option in OPTIONS.items() if option.reloadable)
"""Reloadable keys of sections. Rows of `api_keys` and `request_classes` are reloadable except for names and ranks."""
LOADED_FOR: Final = ("model_config.decode_batch_size", "scheduler_config.max_prefill_tokens")
"""Keys whose values must not rise above those at the start, because WorkAgents allocated memory for these."""
MAX_NAMED: Final = 8


class Change(NamedTuple):
    key: str
    before: Any
    after: Any
    source: str

    def __str__(self) -> str:
        if self.key.endswith(".key_sha256"):
            return self.key
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.after)}"


def read_again(running: ServingConfig) -> ServingConfig:
    """Read the files of a configuration again, with the original flags. Raise ConfigError if they break a rule."""
    read = read_all_again(running)
    return read if running.origin is None or running.origin.row is None else row_of(read, running.origin.row)


def read_all_again(running: ServingConfig) -> ServingConfig:
    """Read the files again as `read_again` does, but return the whole server's configuration, with all `models`."""
    origin = running.origin
    if origin is None or origin.path is None:
        raise ConfigError("there is no YAML to read again: the server was started without --config")
    path = Path(origin.path)
    if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
        raise ConfigError(f"{path}: must be a regular file to be read again")
    return load_config(path, origin.overrides, origin.model)


def row_of(config: ServingConfig, name: str) -> ServingConfig:
    for each in config.models:
        if each.model.model_name == name:
            return each
    names = ", ".join(each.model.model_name for each in config.models) or "none"
    raise ConfigError(f"the section `models` must have a row of this name; its rows are {names}. Given: {name}")


def check_reload(started: ServingConfig, running: ServingConfig, read: ServingConfig) -> list[Change]:
    """Return how `read` differs from `running`. Raise ConfigError if a key needs a restart, or exceeds its value in
    `started`, for which the WorkAgents were loaded.
    """
    changes = list(_changes(running, read))
    fixed = [str(change) for change in changes if not _may_change(change.key)]
    if fixed:
        more = f" and {len(fixed) - MAX_NAMED} more" if len(fixed) > MAX_NAMED else ""
        row = None if started.origin is None else started.origin.row
        how = "only a restart changes" if row is None else f"only POST /v1/models/{row}/replace or a restart changes"
        raise ConfigError(f"{how} {', '.join(fixed[:MAX_NAMED])}{more}; nothing is changed")
    if bool(running.api_keys) != bool(read.api_keys):
        raise ConfigError(
            "`api_keys` cannot become empty or non-empty by a reload: restart the server; nothing is changed"
        )
    for change in changes:
        if change.key in LOADED_FOR and change.after > (limit := _values(started)[change.key]):
            rule = f"must be at most {limit}, for which the WorkAgents were loaded, without a restart"
            raise ConfigError(f"{change.source}: `{change.key}` {rule}. Given: {change.after}; nothing is changed")
        if change.key == "scheduler_config.policy" and PolicyName.FCFS in (change.before, change.after):
            raise ConfigError(
                f"{change.source}: `{change.key}` must not change from or to fcfs without a restart, because fcfs has"
                f" no classes. Given: {change.after}; nothing is changed"
            )
    return changes


def _may_change(key: str) -> bool:
    table, _, rest = key.partition(".")
    if table == "api_keys":
        return True
    if table == "request_classes":
        return rest.partition(".")[2] not in ("", "rank")
    return key in RELOADABLE


def _changes(before: ServingConfig, after: ServingConfig) -> Iterator[Change]:
    old, new = _values(before), _values(after)
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key):
            yield Change(key, old.get(key), new.get(key), after.sources.get(key, "the YAML"))


def _values(config: ServingConfig) -> dict[str, Any]:
    found = {
        f"{section}.{item.name}": getattr(getattr(config, attribute), item.name)
        for section, (attribute, section_type) in SECTIONS.items()
        for item in dataclasses.fields(section_type)
    }
    for table, description in TABLES.items():
        for row in getattr(config, table):
            found[f"{table}.{row.name}"] = "given"
            found.update({f"{table}.{row.name}.{key}": getattr(row, key) for key in description.rules})
    return found


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)
