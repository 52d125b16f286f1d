"""What scripts/setup.sh says and finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "scripts" / "setup.sh"


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/bash", "-c", f"set -euo pipefail; source {SETUP}; {script}"]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **environment})


def test_progress_reaches_a_captured_output_while_it_lasts() -> None:
    """`SECONDS` is bash's own clock; setting it stands for waiting."""
    lines = "echo ' Collecting this'; echo ' Downloading that (800 MB)'"
    done = run(
        f'SECONDS=0; read() {{ builtin read "$@" && SECONDS=$((SECONDS + 20)); }}; '
        f"{{ {lines}; }} | show_progress installing"
    )
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "installing ...",
        "installing (20 s): Collecting this",
        "installing (40 s): Downloading that (800 MB)",
        "installing: 40 s",
    ]


@pytest.mark.parametrize(("version", "is_found"), [("3.11", True), ("3.12", True), ("3.10", False), ("3.13", False)])
def test_a_python_that_the_packages_exist_for_is_found(tmp_path: Path, version: str, is_found: bool) -> None:
    major, minor = version.split(".")
    pretend = f"import sys; sys.version_info = ({major}, {minor}, 0); exec(sys.argv.pop(1))"
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{pretend}' \"$2\"\n")
    python.chmod(0o755)
    (tmp_path / "dirname").symlink_to("/usr/bin/dirname")
    done = run("find_python", PATH=str(tmp_path))
    assert done.stdout == (f"{python}\n" if is_found else "")
    assert done.returncode == (0 if is_found else 1)
    assert ("Python 3.11 or 3.12 is needed" in done.stderr) == (not is_found)
