"""Processes of this package import nothing from the folder that somebody happens to be in."""

import subprocess
from pathlib import Path

import llm_serving
from llm_serving.core.own_process import command_of


def test_files_of_the_folder_are_no_modules(tmp_path):
    for name in ("logging.py", "signal.py", "yaml.py"):
        (tmp_path / name).write_text("raise SystemExit('this is not what was meant')\n")
    log = tmp_path / "server.log"
    log.touch()
    command = command_of("llm_serving.log_keeper", str(log), "1048576", "2")
    subprocess.run(command, cwd=tmp_path, input=b"a line\n", check=True, timeout=60)
    assert log.read_text() == "a line\n"


def test_nobody_starts_one_in_another_way():
    package = Path(llm_serving.__file__).parent
    assert [str(path) for path in package.rglob("*.py") if "sys.executable" in path.read_text()] == [
        str(package / "core" / "own_process.py")
    ]
