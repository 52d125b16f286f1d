"""Every demand of a device in docs/explanation/ascend.md names a test that exists, and no such test needs a device."""

import pytest
from support.tables import PROJECT, missing_tests, rows

ROWS = rows((PROJECT / "docs" / "explanation" / "ascend.md").read_text(), "the device")


def test_there_are_rows():
    assert len(ROWS) > 10
    assert all(len(row) == 3 for row in ROWS), [row for row in ROWS if len(row) != 3]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_the_tests_of_a_demand_exist(row):
    assert missing_tests(row) == []
