"""The options of a script, read from its source without importing it, because the import would load MindSpore."""

from __future__ import annotations

import argparse
import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

TAKEN = ("action", "nargs", "choices", "dest")


class WrongCommandError(Exception):
    """A command line that its script would refuse."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WrongCommandError(message)


@functools.cache
def parser_of(script: Path) -> argparse.ArgumentParser | None:
    """Return a parser with the `add_argument` calls of a script, and of functions imported from its folder.

    Any value is valid unless the source lists choices, and no option is required.

    Returns:
        None if the script has no parser.
    """
    text = script.read_text(encoding="utf-8")
    if "ArgumentParser" not in text and "parser_of(" not in text:
        return None
    tree = ast.parse(text)
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--help", action="store_true")
    calls = [*_calls(tree), *(call for function in _imported(tree, script.parent) for call in _calls(function))]
    for call in calls:
        names = [name for name in map(_value, call.args) if isinstance(name, str)]
        settings = {each.arg: _value(each.value) for each in call.keywords if each.arg in TAKEN}
        settings = {name: value for name, value in settings.items() if value is not None}
        if names and not names[0].startswith("-"):
            settings.setdefault("nargs", "?")
        parser.add_argument(*names, **settings)
    return parser


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            yield node


def _imported(tree: ast.AST, folder: Path) -> Iterator[ast.AST]:
    """Return the functions imported from files of the same folder."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (file := folder / f"{node.module}.py").is_file():
            names = {each.name for each in node.names}
            for other in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(other, ast.FunctionDef) and other.name in names and "add_argument" in ast.dump(other):
                    yield other


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
