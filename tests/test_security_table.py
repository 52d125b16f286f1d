"""Every row of docs/security.md names a file of the package and a test that exist."""

import ast
import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
PACKAGE = PROJECT / "llm-serving" / "llm_serving"


def rows(text: str) -> list[list[str]]:
    """Cells of the rows of all tables, without their headers."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for row in cells if not set("".join(row)) <= set("-: ") and row[0] != "threat"]


ROWS = rows((PROJECT / "docs" / "security.md").read_text())


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


def test_there_are_rows():
    assert len(ROWS) > 5
    assert all(len(row) == 4 for row in ROWS), [row for row in ROWS if len(row) != 4]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_the_tests_of_a_threat_exist(row):
    assert missing_tests(row) == []


@pytest.mark.parametrize(
    "cell",
    ["", "tests/test_imports.py", "`tests/nowhere.py`", "`tests/test_imports.py::test_nothing_of_the_kind`"],
)
def test_the_check_sees_what_is_missing(cell):
    assert len(missing_tests(["threat", "duty", "where", cell])) == 1


def test_the_check_finds_what_is_there():
    cell = "`tests/test_imports.py::test_every_part_has_a_place`, `tests/test_launcher.py::TestStop`"
    assert missing_tests(["threat", "duty", "where", cell]) == []
