"""The effective configuration as text: what `llm-serving config check` prints."""

import dataclasses
from pathlib import Path
from typing import Any

from llm_serving.config.schema import SECTIONS, ServingConfig


def describe(config: ServingConfig) -> str:
    """Every value with its source, in YAML that can be loaded again, and the notices as comments below."""
    lines = []
    for section, (attribute, section_type) in SECTIONS.items():
        values = getattr(config, attribute)
        keys = [item.name for item in dataclasses.fields(section_type)]
        entries = [(f"    {key}: {_yaml(getattr(values, key))}", key) for key in keys]
        width = min(max(len(text) for text, _ in entries), 60)
        lines.append(f"{section}:")
        lines += [f"{text:<{width}}  # {config.sources.get(f'{section}.{key}', 'default')}" for text, key in entries]
    if config.notices:
        lines.append("# notices:")
        lines += [f"#   - {notice}" for notice in config.notices]
    return "\n".join(lines)


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, str | Path):
        return "'" + str(value).replace("'", "''") + "'"
    return str(value)
