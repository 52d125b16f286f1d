"""Run the contest's load test and compare its figures."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from acceptance.device.outcome import Outcome, reason, table

TITLE = "Load"
SCRIPT = Path(__file__).parents[3] / "performance" / "test_serving_performance.py"
CONTEST = (
    ("one prompt, one request at a time", "3,000-3,500"),
    ("decode batch 128, as submitted", "674"),
    ("packed prompts, delayed insertion: the best found", "437"),
)
"""Seconds for 1,500 alpaca prompts on one NPU, Llama-2-7B in float16."""
CONTEST_S = 674.0
"""Maximum seconds for the contest's load with the contest's model: what the submitted server took."""
CONTEST_LOAD = (10.0, 150.0)
"""(requests per second, duration of their arrivals in seconds)."""
WARM_UP_S = 3.0
LIMIT_S = 7200.0
DONE = re.compile(r"All Tasks Done; Exec Time is ([\d.]+)")


def examine(
    port: int, rate: float, seconds: float, folder: Path, is_contest_model: bool = False, script: Path = SCRIPT
) -> Outcome:
    """Do a short warm-up run, then measure.

    Args:
        port: Port of the server.
        rate: Requests per second.
        seconds: Duration of the arrivals.
        folder: Output folder of the load test.
        is_contest_model: Whether the server has a model of the size of Llama-2-7B.
        script: The load test.
    """
    for span in (WARM_UP_S, seconds):
        options = ["-X", f"{rate:g}", "-P", str(port), "-O", str(folder), "-T", f"{span:g}"]
        command = [sys.executable, str(script), *options, "--dataset", "alpaca-like"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return Outcome.failed(TITLE, f"the load test took longer than {LIMIT_S:.0f} s")
        if done.returncode != 0:
            error = reason(done.stderr or done.stdout)
            return Outcome.failed(TITLE, f"the load test ends with {done.returncode}: {error}")
    logs = sorted((folder / "testLog").glob("*.log"), key=lambda path: path.stat().st_mtime)
    found = DONE.findall(logs[-1].read_text()) if logs else []
    if not found:
        return Outcome.failed(TITLE, f"the log in {folder}/testLog has no line `All Tasks Done`")
    took = float(found[-1])
    faults = []
    if is_contest_model and (rate, seconds) == CONTEST_LOAD and took > CONTEST_S:
        faults.append(f"the contest's load takes {took:.0f} s; the contest's server took {CONTEST_S:.0f} s")
    name = f"this server, {rate * seconds:.0f} requests at {rate:g} a second"
    rows = [*CONTEST, (name, f"{took:.1f}")]
    note = ["", "The contest's rows are 1,500 prompts at 10 a second (`-X 10 -T 150`); others do not compare."]
    lines = [*table(("setting", "seconds"), rows), *note, "", "```", *done.stdout.splitlines(), "```"]
    return Outcome(TITLE, lines, faults)
