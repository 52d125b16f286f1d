from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = Path(__file__).parents[2] / "scripts" / "setup.sh"


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/bash", "-c", f"set -euo pipefail; source {SETUP}; {script}"]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **environment})


def test_setup_prints_progress_to_a_captured_output(tmp_path: Path) -> None:
    """The script measures time with bash's `SECONDS`, which is a plain variable here after `unset`."""
    lines = "echo ' Collecting this'; echo ' Downloading that (800 MB)'"
    done = run(
        f'unset SECONDS; SECONDS=0; read() {{ builtin read "$@" && SECONDS=$((SECONDS + 20)); }}; '
        f"{{ {lines}; }} | show_progress installing",
        LLM_SERVING_VENV=str(tmp_path),
    )
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "installing ...",
        "installing (20 s): Collecting this",
        "installing (40 s): Downloading that (800 MB)",
        "installing: 40 s",
    ]


def test_setup_counts_installed_packages_and_compiled_sources(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in ("pip-1.dist-info", "a-1.dist-info", "a", "b-2.dist-info"):
        (packages / name).mkdir(parents=True)
    start = tmp_path / "install.log.start"
    start.touch()
    for path, time in ((start, 1000), (packages / "pip-1.dist-info", 500)):
        os.utime(path, (time, time))
    line = "Installing collected packages: a, b, c-d"
    done = run(f'describe_progress "{line}"', LLM_SERVING_VENV=str(tmp_path))
    assert done.stdout == "2 of 3 packages installed"
    (tmp_path / "compile.log").write_text("x: 3 of 39 sources, 5 s; left: y\nx: 12 of 39 sources, 10 s; left: y\n")
    done = run(f'describe_progress "{line}"', LLM_SERVING_VENV=str(tmp_path))
    assert done.stdout == "2 of 3 packages installed; kernels: 12 of 39 sources compiled"


@pytest.mark.parametrize(("version", "is_found"), [("3.11", True), ("3.12", True), ("3.10", False), ("3.13", False)])
def test_setup_finds_a_supported_python(tmp_path: Path, version: str, is_found: bool) -> None:
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


def test_setup_finds_its_folder_in_spite_of_cdpath(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(SETUP.parents[1])
    script = 'source scripts/setup.sh; echo "$root"'
    done = subprocess.run(
        ["/bin/bash", "-c", f"cd {tmp_path}/link; {script}"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "CDPATH": f".:{tmp_path}"},
    )
    assert done.stdout == f"{SETUP.parents[1].resolve()}\n"


def test_setup_makes_a_relative_path_of_the_virtual_environment_absolute() -> None:
    done = run('cd /usr; source "$root/scripts/setup.sh"; echo "$venv"', LLM_SERVING_VENV="my env")
    assert done.stdout == "/usr/my env\n"


def fake_venv(folder: Path, pip: str) -> Path:
    """Create a virtual environment whose `python` is a shell script: it finds pip, and runs `pip` to install."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *--version) exit 0;; *install*) {pip};; esac\n')
    python.chmod(0o755)
    return folder


def test_setup_reports_a_failed_installation(tmp_path: Path) -> None:
    """Also for a caller without bash's `pipefail`."""
    venv = fake_venv(tmp_path / "venv", "echo no network; exit 1")
    command = ["/bin/bash", "-c", f'set -e; source {SETUP}; install ""']
    environment = {"PATH": "/usr/bin:/bin", "LLM_SERVING_VENV": str(venv)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "the packages could not be installed" in done.stderr
    assert not (venv / "installed").exists()


def test_setup_installs_again_only_without_a_working_python(tmp_path: Path) -> None:
    venv = fake_venv(tmp_path / "venv", "exit 0")
    assert "installing into" in run('install ""', LLM_SERVING_VENV=str(venv)).stderr
    assert run('install ""', LLM_SERVING_VENV=str(venv)).stderr == ""
    (venv / "bin" / "python").unlink()
    (venv / "bin" / "python").symlink_to(tmp_path / "gone")
    done = run('find_python() { echo /bin/false; }; install ""', LLM_SERVING_VENV=str(venv))
    assert "cannot make a virtual environment" in done.stderr
    assert not (venv / "bin" / "python").is_symlink()


def test_setup_accepts_a_read_only_installation(tmp_path: Path) -> None:
    venv = fake_venv(tmp_path / "venv", "exit 0")
    assert run('install ""', LLM_SERVING_VENV=str(venv)).returncode == 0
    (venv / "install.lock").unlink()
    (venv / "install.lock").mkdir()  # cannot be created by any user, not even root
    done = run('install ""', LLM_SERVING_VENV=str(venv))
    assert (done.returncode, done.stderr) == (0, "")
    done = run('install "[dev]"', LLM_SERVING_VENV=str(venv))
    assert done.returncode == 1
    assert f"cannot write to {venv}" in done.stderr


def test_scripts_run_through_a_symbolic_link(tmp_path: Path) -> None:
    for name in ("start.sh", "stop.sh"):
        (tmp_path / name).symlink_to(SETUP.parent / name)
    environment = {"PATH": "/usr/bin:/bin", "LLM_SERVING_VENV": str(tmp_path / "venv")}
    shown = subprocess.run([tmp_path / "start.sh", "--help"], capture_output=True, text=True, env=environment)
    assert shown.stdout.startswith("Installs the package if necessary, then starts a server.")
    stopped = subprocess.run([tmp_path / "stop.sh"], capture_output=True, text=True, env=environment)
    assert stopped.stderr.startswith(f"error: nothing has been installed in {tmp_path}/venv")
