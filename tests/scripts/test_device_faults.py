"""Faults of a device, injected into real processes on a CPU, each found by a part of the acceptance."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import acceptance
import pytest
from acceptance.device import run, step_time
from acceptance.device.step_time import Device
from support.server_process import ONE_THREAD

pytestmark = pytest.mark.mindspore

INJECTED = Path(acceptance.__path__[0]) / "injected"
FOUND: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "attention_scale": (
        ["--parts", "precision", "--families", "llama2", "--dtype", "bfloat16"],
        (r"llama2: an error of \d+\.\d+% of the largest logit in decode steps; 12\.0% are allowed",),
    ),
    "slow_steps slow_prompts": (
        ["--parts", "steps"],
        (
            r"decode, 1 requests: a step takes \d{3,}\.\d ms; \d+\.\d ms are allowed",
            r"prompt of 1024 tokens: a step takes \d{4,}\.\d ms; \d+\.\d ms are allowed",
        ),
    ),
    "decode_window": (
        ["--parts", "contexts"],
        (r"2039 tokens: log-probabilities of decode steps and of prompts differ",),
    ),
    "mixed_rows": (["--parts", "answers"], (r"only \d+\.\d% of the answers are right, 97% are needed",)),
    "lost_slots": (
        ["--parts", "precision", "--families", "qwen3"],
        (r"qwen3: an error of \d+\.\d+% of the largest logit in prompt steps; 1\.5% are allowed",),
    ),
    "crash wrong_positions": (
        ["--parts", "precision", "--families", "qwen3", "llama2"],
        (
            r"qwen3: ended with SIGSEGV: no output; .*\.log",
            r"llama2: an error of \d+\.\d+% of the largest logit in chunk steps; 1\.5% are allowed",
        ),
    ),
}
"""Faults -> options of the acceptance, and what it reports of each. Faults that share a process do not affect what the
other one changes: steps of decoding or of prompts, models that crash or not.
"""
ON_GRAPHS = ("attention_scale", "decode_window")
"""Faults that are injected into graphs of Cells, which stand for those of Ascend: one for a model in a process of its
own, one for a server. The others change inputs or times of steps, which are those of every network, and are injected
into programs, which MindSpore need not compile for seconds.
"""


def test_every_injected_device_fault_is_tested():
    assert set(runpy.run_path(str(INJECTED / "sitecustomize.py"))["FAULTS"]) == {
        fault for faults in FOUND for fault in faults.split()
    }


@pytest.mark.parametrize("faults", FOUND)
def test_acceptance_finds_injected_faults(faults, tmp_path, monkeypatch):
    options, messages = FOUND[faults]
    monkeypatch.setenv("INJECTED_FAULTS", faults)
    monkeypatch.setenv("PYTHONPATH", f"{INJECTED}:{INJECTED.parents[1]}")
    monkeypatch.setattr(step_time, "measured_host", lambda: Device("of the test", 20e9, 1e11))
    monkeypatch.setattr(step_time, "REPEATS", 1)
    monkeypatch.setattr(step_time, "NUM_TOKENS", 4)
    report = tmp_path / "report.md"
    own = ["--device", "cpu", "--set", ONE_THREAD, "--report", str(report), "--logs", str(tmp_path / "logs")]
    own += [] if faults in ON_GRAPHS else ["--set", "device_config.kernels=auto"]
    assert run.main([*own, *options]) == 1
    text = report.read_text()
    for message in messages:
        assert re.search(rf"(?m)^- \*\*{message}", text), text
    if "crash" in faults:
        assert re.search(r"(?m)^\| llama2 \| 1024 \| 0\.\d\d% ", text), "the next model is computed"
