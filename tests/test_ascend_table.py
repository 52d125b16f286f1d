"""Every requirement for a device, and every earlier finding, in docs/explanation/ascend.md names existing tests."""

import pytest
from support.tables import PROJECT, missing_tests, rows

PAGE = (PROJECT / "docs" / "explanation" / "ascend.md").read_text()
ROWS = rows(PAGE, "the device")
FINDINGS = rows(PAGE, "Finding")


def test_ascend_table_has_rows():
    assert len(ROWS) > 10
    assert all(len(row) == 3 for row in ROWS), [row for row in ROWS if len(row) != 3]


def test_ascend_findings_are_all_listed():
    assert [row[0] for row in FINDINGS] == [f"F{n}" for n in range(1, 10)] + [f"P{n}" for n in range(1, 7)]


@pytest.mark.parametrize("row", [*ROWS, *FINDINGS], ids=lambda row: row[0][:60])
def test_tests_of_each_ascend_requirement_exist(row):
    assert missing_tests(row) == []
