"""Every row of docs/explanation/threats.md names a file of the package and a test that exist."""

import pytest
from support.tables import PROJECT, missing_tests, rows

ROWS = rows((PROJECT / "docs" / "explanation" / "threats.md").read_text(), "threat")


def test_threat_table_has_rows():
    assert len(ROWS) > 5
    assert all(len(row) == 4 for row in ROWS), [row for row in ROWS if len(row) != 4]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_tests_of_each_threat_exist(row):
    assert missing_tests(row) == []


@pytest.mark.parametrize(
    "cell",
    ["", "tests/test_imports.py", "`tests/nowhere.py`", "`tests/test_imports.py::test_nothing_of_the_kind`"],
)
def test_table_check_detects_missing_paths(cell):
    assert len(missing_tests(["threat", "defence", "where", cell])) == 1


def test_table_check_accepts_existing_paths():
    cell = "`tests/test_imports.py::test_every_package_has_an_import_layer`, `tests/test_launcher.py::TestStop`"
    assert missing_tests(["threat", "defence", "where", cell]) == []
