"""The process of a WorkAgent on this machine."""

from __future__ import annotations

import subprocess

import pytest
from llm_serving.executor import worker_process
from llm_serving.executor.worker_process import LocalProcess


class Held(LocalProcess):
    """The system does not let it end, as the driver of a device may."""

    def kill(self) -> None:
        pass


@pytest.mark.parametrize("timeout_s", [None, 0.0])
def test_one_that_does_not_end_though_it_was_killed_is_left_behind(
    timeout_s: float | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_process, "KILLED_S", 0.01)
    process = Held(["sleep", "600"], stdin=subprocess.PIPE)
    process.end(timeout_s)
    assert not process.has_ended
    assert f"WorkAgent (pid {process.pid}) was killed and does not end" in caplog.text
    LocalProcess.kill(process)
    process.end(None)
    assert process.described_end == "code -9"
