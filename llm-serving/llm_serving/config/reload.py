"""Which keys of the YAML a running server takes over when it reads it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from llm_serving.config.loader import load_config
from llm_serving.config.schema import SECTIONS, TABLES, ServingConfig
from llm_serving.core.enums import PolicyName
from llm_serving.errors import ConfigError

RELOADABLE: Final = frozenset(
    {
        *(
            f"model_config.{key}"
            for key in ("decode_batch_size", "prefill_batch_size", "batch_waiting_time", "seq_length")
        ),
        *(
            f"serving_config.{key}"
            for key in (
                *("max_connections", "max_connections_per_address", "max_buffered_bytes", "max_pipelined_bytes"),
                *("max_url_bytes", "max_header_bytes", "max_headers", "max_request_body_bytes"),
                *("header_timeout_s", "body_timeout_s", "write_timeout_s", "max_timeout_s", "anonymous_highest_class"),
                "whole_answer_bytes",
            )
        ),
        *(
            f"scheduler_config.{key}"
            for key in (
                *("policy", "order", "tenant_fairness", "max_overtakes", "max_head_start_steps", "turn_steps"),
                *("max_prefill_tokens", "max_long_prefill_tokens"),
                *("max_consecutive_prefill_steps", "max_consecutive_decode_steps"),
                *("prefill_time_ms_per_req", "decode_time_ms_per_req"),
                *("max_waiting_queue", "max_waiting_tokens", "slo_refusal_factor", "max_running_per_tenant"),
                *("preemption_mode", "swap_block_cost_tokens", "prefix_caching"),
            )
        ),
    }
)
"""Besides the rows of `request_classes`, but for their names and ranks, and of `api_keys`."""
LOADED_FOR: Final = ("model_config.decode_batch_size", "scheduler_config.max_prefill_tokens")
"""WorkAgents have memory for as much as there was at the start."""
MAX_NAMED: Final = 8
"""Keys that an error names."""


class Change(NamedTuple):
    key: str
    before: Any
    after: Any
    source: str
    """Where the value is written."""

    def __str__(self) -> str:
        if self.key.endswith(".key_sha256"):
            return self.key
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.after)}"


def read_again(running: ServingConfig) -> ServingConfig:
    """What the files of a configuration say now; flags and environment as they were at the start.

    Raises:
        ConfigError: They break a rule, or there are none.
    """
    origin = running.origin
    if origin is None or origin.path is None:
        raise ConfigError("there is no YAML to read again: the server was started without --config")
    path = Path(origin.path)
    if path.exists() and not path.is_file():  # who opens a pipe waits for somebody who writes
        raise ConfigError(f"{path}: must be a plain file to be read again")
    return load_config(path, origin.overrides, origin.model)


def check_reload(started: ServingConfig, running: ServingConfig, read: ServingConfig) -> list[Change]:
    """What changes.

    Args:
        started: What the WorkAgents were loaded with.
        running: What holds now.
        read: What is to hold.

    Raises:
        ConfigError: Something would change that cannot while the server runs; nothing may be taken over then.
    """
    changes = list(_changes(running, read))
    fixed = [str(each) for each in changes if not _may_change(each.key)]
    if fixed:
        more = f" and {len(fixed) - MAX_NAMED} more" if len(fixed) > MAX_NAMED else ""
        raise ConfigError(f"only a restart changes {', '.join(fixed[:MAX_NAMED])}{more}; nothing is changed")
    if bool(running.api_keys) != bool(read.api_keys):
        raise ConfigError("only a restart changes whether there are `api_keys`; nothing is changed")
    for change in changes:
        if change.key in LOADED_FOR and change.after > (most := _values(started)[change.key]):
            rule = f"must be at most {most}, for which the WorkAgents were loaded, without a restart"
            raise ConfigError(f"{change.source}: `{change.key}` {rule}. Given: {change.after}; nothing is changed")
        if change.key == "scheduler_config.policy" and PolicyName.FCFS in (change.before, change.after):
            raise ConfigError(
                f"{change.source}: `{change.key}` must not change from or to fcfs, which has no classes,"
                f" without a restart. Given: {change.after}; nothing is changed"
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
    """By "section.key" or "section.row.key"; a row itself stands as "section.row"."""
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
