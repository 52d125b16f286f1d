"""The tuned YAML: the user's file with some keys changed, each with a comment; everything else stays as written."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from llm_serving.config.legacy import ALIASES
from llm_serving.config.schema import ServingConfig

from llm_serving_simulator.report import format_figure, profile_source
from llm_serving_simulator.tuner.problem import TuningObjective, yaml_text
from llm_serving_simulator.tuner.search import Effect
from llm_serving_simulator.tuner.trial import Trial, TrialRunner

CLASSES: Final = "request_classes"
INDENT: Final = 4
WIDTH: Final = 120


def tuned_yaml(
    source: Path, config: ServingConfig, trials: TrialRunner, tuned: Trial, effects: Sequence[Effect]
) -> str:
    """Return the text of the tuned YAML. `source`: the YAML of `config`, the baseline. `tuned`: the best trial."""
    text = source.read_text(encoding="utf-8")
    if any(each.key.startswith(f"{CLASSES}.") for each in effects) and not _has_classes(text):
        text = f"{text.rstrip()}\n\n# The defaults, with the changes marked below.\n{_classes(config)}"
    edits = [Edit(each.key, each.value, _comment(trials.objective, tuned, each)) for each in effects]
    return _header(trials, tuned) + edited(text, edits)


def differences(written: ServingConfig, simulated: ServingConfig) -> list[str]:
    """Return the keys in which the written configuration differs from the simulated one."""
    found = []
    for item in dataclasses.fields(ServingConfig):
        if item.name in ("sources", "notices", "hub_model") or not item.compare:
            continue
        one, other = getattr(written, item.name), getattr(simulated, item.name)
        if one != other and dataclasses.is_dataclass(one):
            names = [each.name for each in dataclasses.fields(one)]
            found += [f"{item.name}.{name}" for name in names if getattr(one, name) != getattr(other, name)]
        elif one != other:
            found.append(item.name)
    return found


def _header(trials: TrialRunner, tuned: Trial) -> str:
    objective = trials.objective
    margin = max((each.margin for each in objective.constraints), default=0.0)
    verdict = (
        "Tuned for" if tuned.feasible else f"NOT reached with a margin of {margin:.0%}, and the nearest found to it:"
    )
    keys = dict.fromkeys([*(each.figure.key for each in objective.constraints), objective.figure.key])
    changes = ", ".join(f"{key} {_shown(trials.baseline, key)} -> {_shown(tuned, key)}" for key in keys)
    lines = (
        f"{verdict} {objective}.",
        f"Load {trials.workload.name}, seed {trials.seed}; {profile_source(trials.profile)}.",
        f"Simulated, before -> tuned: {changes}.",
    )
    return "".join(comment(line, 0) for line in lines)


def _shown(trial: Trial, key: str) -> str:
    return format_figure(key, trial.figures.get(key, float("nan")))


def _comment(objective: TuningObjective, tuned: Trial, effect: Effect) -> str:
    cost = effect.cost(objective, tuned)
    return (
        f"Tuned: was {yaml_text(effect.was)}. With that, {effect.benefit(objective, tuned)}."
        f"{f' It costs: {cost}.' if cost else ''}"
    )


def _has_classes(text: str) -> bool:
    pair = _pair(yaml.compose(text, Loader=yaml.SafeLoader), CLASSES)
    return pair is not None and isinstance(pair[1], yaml.MappingNode)


def _classes(config: ServingConfig) -> str:
    """Return the section of the request classes as block YAML, without keys that are null."""
    lines = [f"{CLASSES}:"]
    for row in config.request_classes:
        values = dataclasses.asdict(row)
        lines.append(f"{' ' * INDENT}{values.pop('name')}:")
        lines += [f"{' ' * 2 * INDENT}{key}: {yaml_text(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


# --- editing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """A key with its new value and the comment above it."""

    key: str
    """ "section.key" or "section.row.key"."""
    value: Any
    comment: str


def edited(text: str, edits: Sequence[Edit]) -> str:
    """Return the YAML text with these keys changed. An existing key keeps its position and the comment after it. A new
    key is added at the end of its section. A value from an anchor or a merge is overridden, not changed at its origin.
    """
    for edit in edits:
        text = _edited(text, edit)
    return text


def _edited(text: str, edit: Edit) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    names = [edit.key, *(old for old, new in ALIASES.items() if new == edit.key)]
    found = [pair for name in names if (pair := _find(root, name.split("."))) is not None]
    for key, value in reversed(found):
        text = _replaced(text, key, value, edit)
    return text if found else _inserted(text, root, edit.key.split("."), edit)


Pair = tuple[yaml.Node, yaml.Node]


def _find(root: yaml.Node | None, names: Sequence[str]) -> Pair | None:
    """Return the nodes of a key and its value; None if it is missing, or its value is an alias."""
    node, pair = root, None
    for name in names:
        pair = _pair(node, name)
        if pair is None:
            return None
        node = pair[1]
    return None if pair is None or _is_alias(pair) else pair


def _pair(node: yaml.Node | None, name: str) -> Pair | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    return next(((key, value) for key, value in node.value if key.value == name), None)


def _is_alias(pair: Pair) -> bool:
    """Return whether the value is defined before its key."""
    return pair[1].start_mark.index < pair[0].end_mark.index


def _replaced(text: str, key: yaml.Node, value: yaml.Node, edit: Edit) -> str:
    start, end = value.start_mark.index, value.end_mark.index
    new = yaml_text(edit.value)
    if start == end:  # the value is empty
        new = f" {new}"
    return _with_comment(text[:start] + new + text[end:], key.start_mark.index, edit.comment)


def _with_comment(text: str, index: int, remark: str) -> str:
    line = text.rfind("\n", 0, index) + 1
    indent = len(text[line:]) - len(text[line:].lstrip(" "))
    return text[:line] + comment(remark, indent) + text[line:]


def comment(text: str, indent: int) -> str:
    # YAML breaks lines at other characters, too
    printable = "".join(each if each.isprintable() else " " for each in text)
    lines = textwrap.wrap(printable, WIDTH - indent - 2)
    return "".join(f"{' ' * indent}# {line}\n" for line in lines)


def _inserted(text: str, root: yaml.Node | None, names: Sequence[str], edit: Edit) -> str:
    """Return the text with a new key in the innermost of its mappings that exists."""
    node, depth = root, 0
    while depth < len(names) - 1 and (pair := _pair(node, names[depth])) is not None:
        if _is_alias(pair):
            break
        node, depth = pair[1], depth + 1
        if isinstance(node, yaml.ScalarNode):  # the section is empty
            lines = _block(names[depth:], pair[0].start_mark.column + INDENT, edit)
            return _insert_after_line(text, node.end_mark.index, lines)
    if isinstance(node, yaml.MappingNode) and node.flow_style:
        last = node.value[-1][1].end_mark.index if node.value else node.start_mark.index + 1
        inner = "".join(f"{name}: {{" for name in names[depth:-1])
        flow = f"{', ' if node.value else ''}{inner}{names[-1]}: {yaml_text(edit.value)}{'}' * inner.count('{')}"
        return _with_comment(text[:last] + flow + text[last:], node.start_mark.index, edit.comment)
    column, end = 0, len(text)
    if isinstance(node, yaml.MappingNode):
        column = node.value[0][0].start_mark.column if node.value else 0
        end = _content_end(node)
    return _insert_after_line(text, end, _block(names[depth:], column, edit))


def _content_end(node: yaml.Node) -> int:
    """Return the end of a block's last value; the end mark of a block is after the comments that follow it."""
    while isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        key, value = node.value[-1]
        if _is_alias((key, value)) or value.end_mark.index == value.start_mark.index:
            return int(key.end_mark.index)
        node = value
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _content_end(node.value[-1])
    return int(node.end_mark.index)


def _insert_after_line(text: str, index: int, lines: str) -> str:
    found = text.find("\n", index)
    at = len(text) if found < 0 else found + 1
    separator = "" if not at or text[at - 1] == "\n" else "\n"
    return text[:at] + separator + lines + text[at:]


def _block(names: Sequence[str], column: int, edit: Edit) -> str:
    """Return nested keys as block YAML, the last one with its comment and value."""
    opened = "".join(f"{' ' * (column + INDENT * depth)}{name}:\n" for depth, name in enumerate(names[:-1]))
    indent = column + INDENT * (len(names) - 1)
    return f"{opened}{comment(edit.comment, indent)}{' ' * indent}{names[-1]}: {yaml_text(edit.value)}\n"
