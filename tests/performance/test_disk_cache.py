"""The benchmark of the disk cache: its table, and a run with the shipped model."""

from __future__ import annotations

import pytest
from benchmarks import disk_cache
from benchmarks.disk_cache import Figures


def test_table_has_a_row_for_each_server() -> None:
    nothing = dict.fromkeys((*disk_cache.COUNTERS, "bytes"), 0.0)
    counted = {"queried_blocks": 8.0, "hit_blocks": 6.0, "read_bytes": 2e6, "written_bytes": 0.0, "bytes": -1.0}
    lines = disk_cache.table(
        {"none": Figures(2.0, 3.0, 0.5, nothing), "some": Figures(1.0, 4.0, 0.25, counted)}
    ).splitlines()
    assert lines[2] == "| none | 2.00 | 3.00 | 0.500 |  | 0.0 | 0.0 | 0.0 |"
    assert lines[3] == "| some | 1.00 | 4.00 | 0.250 | 0.750 | 2.0 | 0.0 | 0.0 |"


@pytest.mark.mindspore
def test_main_reads_the_system_prompt_after_a_restart(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--set", "pa_config.num_blocks=128", "--set", "device_config.num_threads=1"]
    assert disk_cache.main(["--model", "demo", "--tokens", "160", "--requests", "2", *small]) == 0
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows[2:]] == ["| no disk cache", "| empty disk cache", "| after a restart"]
    read, written, size = (float(each.strip(" |")) for each in rows[4][5:])
    assert read > 0.0 and written < read < size


@pytest.mark.parametrize("options", [["--tokens", "0"], ["--requests", "1"]])
def test_main_refuses_options_before_it_starts_a_server(capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        disk_cache.main(["--model", "demo", *options])
    assert "--tokens must be at least 1 and --requests 2" in capsys.readouterr().err
