from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.simulated_recorded_load import record, replay

pytestmark = pytest.mark.end_to_end

NUM_REQUESTS = 100


def test_replay_repeats_the_decisions_of_a_recorded_server(tmp_path: Path) -> None:
    recorded = record(tmp_path, NUM_REQUESTS)
    path = recorded.path
    replayed = replay(path)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert f"{recorded.num_events} events, {recorded.num_decisions} decisions" in replayed.stdout
    assert f"every decision equals the recorded one; hash {recorded.hash}" in replayed.stdout

    explained = replay(path, "--until", "20", "--explain")
    assert explained.returncode == 0
    assert "before step 20: " in explained.stdout and "step 20 computes" in explained.stdout

    data = path.read_bytes()
    path.write_bytes(data[:-5])
    torn = replay(path)
    assert torn.returncode == 0
    assert "is incomplete: the recording was cut off there" in torn.stdout
    path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
    changed = replay(path)
    assert changed.returncode == 1
    assert re.search(r"error: .*\.rec: record \d+ at byte \d+ is damaged", changed.stderr)
