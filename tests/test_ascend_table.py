"""Every requirement for a device in docs/explanation/ascend.md names existing tests, none of which needs a device."""

import pytest
from support.tables import PROJECT, missing_tests, rows

ROWS = rows((PROJECT / "docs" / "explanation" / "ascend.md").read_text(), "the device")


def test_ascend_table_has_rows():
    assert len(ROWS) > 10
    assert all(len(row) == 3 for row in ROWS), [row for row in ROWS if len(row) != 3]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_tests_of_each_ascend_requirement_exist(row):
    assert missing_tests(row) == []
