"""The configuration as text. The text of a key is the docstring below its dataclass field."""

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from llm_serving.config.models import KEY_TEXTS
from llm_serving.config.rules import MEMORY, Rule
from llm_serving.config.schema import DEFAULTS, OPTIONS, SECTIONS, TABLES, ServingConfig
from llm_serving.core.request_class import DEFAULT_CLASSES

WIDTH: Final = 120
INDENT: Final = "    "


# --- effective values -----------------------------------------------------------------------------------------------


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
            lines.append(f"{INDENT}{_yaml(row.name)}:")
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


# --- the texts of the keys ------------------------------------------------------------------------------------------


def key_texts(section_type: type) -> Mapping[str, str]:
    (body,) = [node.body for node in ast.parse(inspect.getsource(section_type)).body if isinstance(node, ast.ClassDef)]
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


@dataclasses.dataclass(frozen=True)
class Key:
    name: str
    default: str
    rule: str
    text: str
    reloadable: bool


def section_keys(section: str, expert: bool) -> list[Key]:
    texts, keys = key_texts(SECTIONS[section][1]), []
    for name, text in texts.items():
        option = OPTIONS[f"{section}.{name}"]
        if option.expert != expert:
            continue
        if option.only_with is not None:
            other, needed = option.only_with
            text += f" Only with `{other}`." if needed is ... else f" Only with `{other}: {needed}`."
        default = None if option.derived else DEFAULTS[f"{section}.{name}"]
        keys.append(Key(name, _default(default, option.rule), _accepted(option.rule), text, option.reloadable))
    return keys


def row_keys(table: str, values: Mapping[str, Any]) -> list[Key]:
    texts = key_texts(TABLES[table].row_type)
    return [
        Key(key, _default(values.get(key), rule), _accepted(rule), texts[key], key != "rank")
        for key, rule in TABLES[table].rules.items()
    ]


def _default(value: Any, rule: Rule) -> str:
    if rule is MEMORY and value is not None:
        return f"{value // 2**30}GB" if value % 2**30 == 0 else f"{value // 2**20}MB"
    if isinstance(value, tuple):
        return f"[{', '.join(_default(item, rule) for item in value)}]"
    if isinstance(value, str | Path) and str(value).replace("_", "").replace(".", "").isalnum():
        return str(value)
    return _yaml(value)


def _accepted(rule: Rule) -> str:
    return rule.text.removeprefix("must be ")


def summary(section_type: type) -> str:
    text = inspect.cleandoc(section_type.__doc__ or "").partition(": ")[2].replace("\n", " ")
    return text[0].upper() + text[1:]


# --- the reference YAML ---------------------------------------------------------------------------------------------

YAML_HEAD: Final = """\
# The reference: every key with its default. Your own file needs only the keys that it changes.
#
# Generated by scripts/write_config_reference.py from the docstrings in llm_serving/config/. The comment above a key is
# its meaning, the comment after its value the rule for values. `reloadable`: a running server applies a new value when
# it reads its YAML again. `null` means "not given": the default applies, and the comment says which.
#
# A relative path is looked up in the folder of its YAML file, then in the working folder, then in the top folder of the
# project. Files that the server writes are relative to its working folder. `~` is the home folder.
#
# `llm-serving config check --config FILE` prints the effective values and the source of each.
# `--set section.key=value` overrides any of them.
"""
EXPERT_HEAD: Final = "# --- expert keys of {}: the defaults suit nearly all servers ---"
CLASSES_TEXT: Final = """\
Request classes, in which requests are scheduled by weighted fair queueing. A request names its class
(`priority_class`), or its `priority` selects the class with the largest rank at or below it. Classes in a file replace
these three as a whole."""
KEYS_TEXT: Final = """\
API keys. Without a row every client may use the server. With a row, every route except /health, /ping and /ui requires
a key, as `Authorization: Bearer KEY` or `X-API-Key: KEY`. `llm-serving hash-key` reads a key and prints its SHA-256.
A row:"""
MODELS_TEXT: Final = """\
Several models in one server, each in a row whose key is its name. A request selects a model by the field `model`; one
without it goes to the first row. With this section, the sections above apply to all models, and `model_config` must not
set `model_path`, `model_name` or `model_aliases`. An administrator loads, replaces and unloads models while the server
runs; the YAML is then read again. See docs/guides/several_models.md. The keys of a row:"""
MODELS_SAMPLE: Final = "chat: {path: models/qwen3}", "embed: {path: models/bge-small, memory_share: 0.2}"
SAMPLE_ROW: Final = {"key_sha256": "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"}


def reference_yaml() -> str:
    lines = [YAML_HEAD]
    for section, (_, section_type) in SECTIONS.items():
        lines += [*_comment(summary(section_type), ""), f"{section}:"]
        lines += _yaml_keys(section_keys(section, expert=False), INDENT)
        if expert := section_keys(section, expert=True):
            lines += [INDENT + EXPERT_HEAD.format(section), "", *_yaml_keys(expert, INDENT)]
    lines += [*_comment(CLASSES_TEXT, ""), "request_classes:"]
    defaults = {item.name: item.default for item in dataclasses.fields(DEFAULT_CLASSES[0])}
    for index, row in enumerate(DEFAULT_CLASSES):
        lines.append(f"{INDENT}{row.name}:")
        keys = row_keys("request_classes", dataclasses.asdict(row))
        if index == 0:
            lines += _yaml_keys(keys, 2 * INDENT)
            continue
        changed = [key for key in keys if getattr(row, key.name) != defaults[key.name]]
        lines += [*(f"{2 * INDENT}{key.name}: {key.default}  # as above" for key in changed), ""]
    sample = list(_yaml_keys(row_keys("api_keys", SAMPLE_ROW | {"admin": False}), 2 * INDENT))
    lines += [*_comment(KEYS_TEXT, ""), f"#{INDENT}team-a:", *(f"#{line}".rstrip() for line in sample[:-1])]
    lines += ["api_keys: {}", "", *_comment(MODELS_TEXT, "")]
    lines += [line for key, text in KEY_TEXTS.items() for line in _comment(f"- {key}: {text}", "")]
    return "\n".join([*lines, *(f"#{INDENT}{row}" for row in MODELS_SAMPLE), "models: {}", ""])


def _yaml_keys(keys: Iterable[Key], indent: str) -> Iterator[str]:
    for key in keys:
        yield from _comment(key.text, indent)
        line = f"{indent}{key.name}: {key.default}"
        rule = f"{key.rule}{'; reloadable' if key.reloadable else ''}"
        if len(line) + len(rule) + 4 > WIDTH:
            yield from _comment(f"Value: {rule}", indent)
            yield line
        else:
            yield f"{line}  # {rule}"
        yield ""


def _comment(text: str, indent: str) -> list[str]:
    width = WIDTH - len(indent) - 2
    return [f"{indent}# {line}" for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)]
