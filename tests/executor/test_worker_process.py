"""The process of a WorkAgent on this machine."""

from __future__ import annotations

import subprocess

import pytest
from llm_serving.executor import worker_process
from llm_serving.executor.worker_process import LocalProcess


class Held(LocalProcess):
    """A process that the system keeps alive after a kill, as the driver of a device may."""

    def kill(self) -> None:
        pass


@pytest.mark.parametrize("timeout_s", [None, 0.0])
def test_a_process_that_survives_its_kill_is_abandoned(
    timeout_s: float | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_process, "KILL_TIMEOUT_S", 0.01)
    process = Held(["sleep", "600"], stdin=subprocess.PIPE)
    process.wait_or_kill(timeout_s)
    assert not process.has_exited
    assert f"WorkAgent (pid {process.pid}) was killed but does not exit" in caplog.text
    LocalProcess.kill(process)
    process.wait_or_kill(None)
    assert process.exit_description == "code -9"
