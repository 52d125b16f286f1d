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


def test_the_folder_is_found_whatever_cdpath_says_and_under_one_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(SETUP.parents[1])
    script = 'source scripts/setup.sh; echo "$root"'
    done = subprocess.run(
        ["/bin/bash", "-c", f"cd {tmp_path}/link; {script}"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "CDPATH": f".:{tmp_path}"},
    )
    assert done.stdout == f"{SETUP.parents[1].resolve()}\n"


def fake_venv(folder: Path, pip: str) -> Path:
    """A virtual environment whose `python` is a shell script that finds pip, and runs `pip` where that installs."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *--version) exit 0;; *install*) {pip};; esac\n')
    python.chmod(0o755)
    return folder


def test_an_install_that_failed_is_not_taken_for_done_by_whoever_asks(tmp_path: Path) -> None:
    """Also of a caller that does not ask bash to look at every part of a pipe."""
    venv = fake_venv(tmp_path / "venv", "echo no network; exit 1")
    command = ["/bin/bash", "-c", f'set -e; source {SETUP}; install ""']
    environment = {"PATH": "/usr/bin:/bin", "LLM_SERVING_VENV": str(venv)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "the packages could not be installed" in done.stderr
    assert not (venv / "installed").exists()


def test_what_is_installed_is_not_installed_again_unless_its_python_is_gone(tmp_path: Path) -> None:
    venv = fake_venv(tmp_path / "venv", "exit 0")
    assert "installing into" in run('install ""', LLM_SERVING_VENV=str(venv)).stderr
    assert run('install ""', LLM_SERVING_VENV=str(venv)).stderr == ""
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to(tmp_path / "gone")
    done = run('find_python() { echo /bin/false; }; install ""', LLM_SERVING_VENV=str(venv))
    assert "cannot make a virtual environment" in done.stderr
    assert not (venv / "bin" / "python").is_symlink()


def test_whoever_may_only_read_what_is_installed_needs_no_more(tmp_path: Path) -> None:
    venv = fake_venv(tmp_path / "venv", "exit 0")
    assert run('install ""', LLM_SERVING_VENV=str(venv)).returncode == 0
    (venv / "install.lock").unlink()
    (venv / "install.lock").mkdir()  # nobody can write there, not even root
    done = run('install ""', LLM_SERVING_VENV=str(venv))
    assert (done.returncode, done.stderr) == (0, "")
    done = run('install "[dev]"', LLM_SERVING_VENV=str(venv))
    assert done.returncode == 1
    assert f"cannot write to {venv}" in done.stderr


def test_a_script_is_run_by_a_link_to_it_too(tmp_path: Path) -> None:
    for name in ("start.sh", "stop.sh"):
        (tmp_path / name).symlink_to(SETUP.parent / name)
    environment = {"PATH": "/usr/bin:/bin", "LLM_SERVING_VENV": str(tmp_path / "venv")}
    shown = subprocess.run([tmp_path / "start.sh", "--help"], capture_output=True, text=True, env=environment)
    assert shown.stdout.startswith("Sets up what is missing, then serves.")
    stopped = subprocess.run([tmp_path / "stop.sh"], capture_output=True, text=True, env=environment)
    assert stopped.stderr.startswith(f"error: nothing has been installed in {tmp_path}/venv")
