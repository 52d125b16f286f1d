"""The example that teaches the step loop runs, stays short, and shows what it claims to show."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
EXAMPLE = PROJECT / "llm-serving" / "examples" / "minimal_engine.py"


def test_example_continues_every_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLE))
    scheduler, requests = example["create_scheduler"](), example["create_requests"](12)
    example["generate"](scheduler, requests)
    steps = capsys.readouterr().out
    answers = {request.request_id: request.output_token_ids for request in requests}
    assert answers["threes"] == list(range(45, 81, 3))
    assert answers["tens"] == list(range(40, 160, 10))
    assert answers["down"] == list(range(85, 73, -1))
    assert answers["sevens"] == list(range(49, 133, 7))
    assert re.search(r"^threes 0\+8 .*\n.*threes 8\+6", steps), "a prompt in chunks"
    assert "preempted down" in steps
    assert re.search(r"down 4\+\d", steps), "a prefix cache hit when a preempted request returns"
    assert scheduler.blocks.pool.num_used_blocks == 0


def test_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 150


def test_reading_path_is_short() -> None:
    """The README names at most eight files after the example, with at most 1,500 lines together."""
    readme = (PROJECT / "README.md").read_text()
    section = readme.split("## Reading path")[1].split("\n## ")[0]
    files = re.findall(r"^\d\. `([\w/]+\.py)`", section, re.MULTILINE)
    lines = [len((PROJECT / "llm-serving" / file).read_text().splitlines()) for file in files]
    assert files[0] == "examples/minimal_engine.py"
    assert 1 < len(files) <= 9
    assert sum(lines[1:]) <= 1500
