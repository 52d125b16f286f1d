"""The configuration as text. The text of a key is the docstring below its dataclass field."""

import ast
import dataclasses
import inspect
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from llm_serving.config.schema import DEFAULTS, SECTIONS, TABLES, ServingConfig

INDENT: Final = "    "


def describe(config: ServingConfig) -> str:
    """Return every value with its source as loadable YAML, followed by the notices as comments."""
    lines = []
    for section, (attribute, section_type) in SECTIONS.items():
        lines.append(f"{section}:")
        keys = [item.name for item in dataclasses.fields(section_type)]
        lines += _entries(config, section, getattr(config, attribute), keys, INDENT)
    for section, table in TABLES.items():
        rows = getattr(config, section)
        lines.append(f"{section}:" if rows else f"{section}: {{}}")
        for row in rows:
            lines.append(f"{INDENT}{yaml_text(row.name)}:")
            lines += _entries(config, f"{section}.{row.name}", row, list(table.rules), 2 * INDENT)
    if config.notices:
        lines.append("# notices:")
        lines += [f"#   - {notice}" for notice in config.notices]
    return "\n".join(lines)


def _entries(config: ServingConfig, place: str, values: object, keys: list[str], indent: str) -> list[str]:
    entries = [(f"{indent}{key}: {_value(f'{place}.{key}', getattr(values, key))}", key) for key in keys]
    width = min(max(len(text) for text, _ in entries), 60)
    return [f"{text:<{width}}  # {config.sources.get(f'{place}.{key}', 'default')}" for text, key in entries]


def _value(name: str, value: Any) -> str:
    # Some keys whose default is an empty list refuse an empty list.
    return "null" if value == () == DEFAULTS.get(name) else yaml_text(value)


def yaml_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, float):
        # In YAML 1.1 a number with an exponent needs a point: `1e-05` would be text.
        text = repr(value)
        return text if "." in text else text.replace("e", ".0e")
    if isinstance(value, tuple):
        return f"[{', '.join(map(yaml_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{yaml_text(name)}: {yaml_text(each)}' for name, each in value.items())}}}"
    if isinstance(value, str | Path):
        text = str(value)
        return "'" + text.replace("'", "''") + "'" if text.isprintable() else json.dumps(text)
    return str(value)


def key_texts(section_type: type) -> Mapping[str, str]:
    (body,) = [node.body for node in ast.parse(inspect.getsource(section_type)).body if isinstance(node, ast.ClassDef)]
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
