"""A YAML file of somebody with some of its keys changed: everything else stays as it was written, comments included."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml
from llm_serving.config.legacy import ALIASES

from llm_serving_simulator.tuner.knobs import yaml_text

INDENT: Final = 4
WIDTH: Final = 120


@dataclass(frozen=True)
class Edit:
    """A key, its new value, and what is to be said of it."""

    key: str
    """ "section.key" or "section.row.key"."""
    value: Any
    comment: str


def edited(text: str, edits: Sequence[Edit]) -> str:
    """The text of a YAML file with these keys changed, each with a comment above.

    A key that is there keeps its place and what stands behind it; others come at the end of their section, and new
    sections at the end of the file. What comes by an anchor or a merge is overridden, not changed where it stands.
    """
    for edit in edits:
        text = _edit(text, edit)
    return text


def _edit(text: str, edit: Edit) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    names = [edit.key, *(old for old, new in ALIASES.items() if new == edit.key)]
    found = [pair for name in names if (pair := _find(root, name.split("."))) is not None]
    if found:
        for key, value in reversed(found):
            text = _replace(text, key, value, edit)
        return text
    return _insert(text, root, edit.key.split("."), edit)


def _find(root: yaml.Node | None, names: Sequence[str]) -> tuple[yaml.Node, yaml.Node] | None:
    """The nodes of a key and its value; None where it is not there, or its value stands elsewhere."""
    node, pair = root, None
    for name in names:
        pair = _pair(node, name)
        if pair is None:
            return None
        node = pair[1]
    if pair is None or pair[1].start_mark.index < pair[0].end_mark.index:
        return None
    return pair


def _pair(node: yaml.Node | None, name: str) -> tuple[yaml.Node, yaml.Node] | None:
    if not isinstance(node, yaml.MappingNode):
        return None
    return next(((key, value) for key, value in node.value if key.value == name), None)


def _replace(text: str, key: yaml.Node, value: yaml.Node, edit: Edit) -> str:
    begin, end = value.start_mark.index, value.end_mark.index
    new = yaml_text(edit.value)
    if begin == end:  # nothing stands there
        new = f" {new}"
    text = text[:begin] + new + text[end:]
    return _with_comment(text, key.start_mark.index, edit.comment)


def _with_comment(text: str, index: int, remark: str) -> str:
    """With the comment above the line of a place."""
    line = text.rfind("\n", 0, index) + 1
    indent = len(text[line:]) - len(text[line:].lstrip(" "))
    return text[:line] + comment(remark, indent) + text[line:]


def comment(text: str, indent: int) -> str:
    """Lines of a comment, each of at most `WIDTH` characters where words allow it."""
    printable = "".join(each if each.isprintable() else " " for each in text)  # else it might end the line for YAML
    lines = textwrap.wrap(printable, WIDTH - indent - 2)
    return "".join(f"{' ' * indent}# {line}\n" for line in lines)


def _insert(text: str, root: yaml.Node | None, names: Sequence[str], edit: Edit) -> str:
    """With a key that is not there yet, in the innermost of its mappings that is."""
    node, depth = root, 0
    while depth < len(names) - 1 and (pair := _pair(node, names[depth])) is not None:
        if pair[1].start_mark.index < pair[0].end_mark.index:
            break
        empty = isinstance(pair[1], yaml.ScalarNode)
        node, depth = pair[1], depth + 1
        if empty:
            line_end = _line_end(text, pair[1].end_mark.index)
            return _put(text, line_end, _lines(names[depth:], pair[0].start_mark.column + INDENT, edit))
    if isinstance(node, yaml.MappingNode) and node.flow_style:
        last = node.value[-1][1].end_mark.index if node.value else node.start_mark.index + 1
        inner = "".join(f"{name}: {{" for name in names[depth:-1])
        flow = f"{', ' if node.value else ''}{inner}{names[-1]}: {yaml_text(edit.value)}{'}' * inner.count('{')}"
        return _with_comment(text[:last] + flow + text[last:], node.start_mark.index, edit.comment)
    column = node.value[0][0].start_mark.column if isinstance(node, yaml.MappingNode) and node.value else 0
    end = _last_end(node) if isinstance(node, yaml.MappingNode) else len(text)
    return _put(text, _line_end(text, end), _lines(names[depth:], column, edit))


def _last_end(node: yaml.Node) -> int:
    """Where the last value of a block ends; its own end mark is behind the comments that follow."""
    while isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        key, value = node.value[-1]
        if value.start_mark.index < key.end_mark.index or value.end_mark.index == value.start_mark.index:
            return int(key.end_mark.index)
        node = value
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _last_end(node.value[-1])
    return int(node.end_mark.index)


def _line_end(text: str, index: int) -> int:
    """Where the line of a place ends, the line break included."""
    found = text.find("\n", index)
    return len(text) if found < 0 else found + 1


def _put(text: str, at: int, lines: str) -> str:
    before = text[:at]
    if before and not before.endswith("\n"):
        before += "\n"
    return before + lines + text[at:]


def _lines(names: Sequence[str], column: int, edit: Edit) -> str:
    """Nested keys, the last with its comment and value."""
    opened = "".join(f"{' ' * (column + INDENT * depth)}{name}:\n" for depth, name in enumerate(names[:-1]))
    indent = column + INDENT * (len(names) - 1)
    return f"{opened}{comment(edit.comment, indent)}{' ' * indent}{names[-1]}: {yaml_text(edit.value)}\n"


def rows_of(section: str, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """A section of rows as block YAML, keys without a value left out."""

    def lines() -> Iterator[str]:
        yield f"{section}:"
        for name, values in rows:
            yield f"{' ' * INDENT}{name}:"
            for key, value in values.items():
                if value is not None:
                    yield f"{' ' * 2 * INDENT}{key}: {yaml_text(value)}"

    return "\n".join(lines()) + "\n"
