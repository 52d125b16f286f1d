"""The effective configuration as text: what `llm-serving config check` prints."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from llm_serving.config.schema import SECTIONS, TABLES, ServingConfig
from llm_serving.config.values import DEFAULTS


def describe(config: ServingConfig) -> str:
    """Every value with its source, in YAML that can be loaded again, and the notices as comments below."""
    lines = []
    for section, (attribute, section_type) in SECTIONS.items():
        lines.append(f"{section}:")
        keys = [item.name for item in dataclasses.fields(section_type)]
        lines += _entries(config, section, getattr(config, attribute), keys, "    ")
    for section, table in TABLES.items():
        rows = getattr(config, section)
        lines.append(f"{section}:" if rows else f"{section}: {{}}")
        for row in rows:
            lines.append(f"    {_yaml(row.name)}:")
            lines += _entries(config, f"{section}.{row.name}", row, list(table.rules), "        ")
    if config.notices:
        lines.append("# notices:")
        lines += [f"#   - {notice}" for notice in config.notices]
    return "\n".join(lines)


def _entries(config: ServingConfig, place: str, values: object, keys: list[str], indent: str) -> list[str]:
    """A line a key, with its source."""
    entries = [(f"{indent}{key}: {_value(f'{place}.{key}', getattr(values, key))}", key) for key in keys]
    width = min(max(len(text) for text, _ in entries), 60)
    return [f"{text:<{width}}  # {config.sources.get(f'{place}.{key}', 'default')}" for text, key in entries]


def _value(name: str, value: Any) -> str:
    # Some keys that are lists of nothing by default refuse an empty list.
    return "null" if value == () == DEFAULTS.get(name) else _yaml(value)


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, float):
        # In YAML 1.1 a number with an exponent needs a point: `1e-05` would be text.
        text = repr(value)
        return text if "." in text else text.replace("e", ".0e")
    if isinstance(value, tuple):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, str | Path):
        text = str(value)
        return "'" + text.replace("'", "''") + "'" if text.isprintable() else json.dumps(text)
    return str(value)
