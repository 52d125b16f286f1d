"""Tables of documents whose last column lists tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def rows(text: str, first: str) -> list[list[str]]:
    """Return the cells of rows of all tables whose header begins with `first`, without headers.

    Args:
        text: A document.
        first: First cell of the headers.
    """
    found: list[list[str]] = []
    is_wanted, before = False, ""
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
            if not before.startswith("|"):
                is_wanted = cells[0] == first
            elif is_wanted and not set("".join(cells)) <= set("-: "):
                found.append(cells)
        before = line
    return found


def missing_tests(row: list[str]) -> list[str]:
    """Return the tests of a row that do not exist; the row itself if it lists none."""
    named = re.findall(r"`(tests/[^`]+)`", row[-1])
    return [test for test in named if not exists(test)] or ([] if named else [f"no test is named: {row[0]}"])


def exists(test: str) -> bool:
    """Return whether a path exists: a folder, a file, or a function or class in it, `tests/a.py::TestB::test_c`."""
    file, *names = re.sub(r"\[.*\]$", "", test).split("::")
    path = PROJECT / file
    if not path.exists():
        return False
    inside: ast.AST | None = ast.parse(path.read_text()) if names else None
    for name in names:
        inside = next((each for each in getattr(inside, "body", []) if getattr(each, "name", None) == name), None)
        if inside is None:
            return False
    return True
