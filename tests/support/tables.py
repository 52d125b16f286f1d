"""Tables of documents whose last column names tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


def rows(text: str, first: str) -> list[list[str]]:
    """Cells of the rows of all tables whose header does not begin otherwise, without headers.

    Args:
        text: A document.
        first: Of the headers, the first cell.
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
    """Tests that a row names and that are not there; the row itself if it names none."""
    named = re.findall(r"`(tests/[^`]+)`", row[-1])
    return [test for test in named if not is_there(test)] or ([] if named else [f"no test is named: {row[0]}"])


def is_there(test: str) -> bool:
    """Of a folder, a file, or a function or class in it: `tests/a.py::TestB::test_c`."""
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
