"""scripts/acceptance.sh: the table reports failures of one client, and the other clients still run."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from acceptance import run

CHECKING = Path(run.__file__).parent / "clients" / "checking.py"
LINES = "import sys; [print(line, file=sys.stderr) for line in ('first', 'one', 'two', 'three')]; sys.exit(2)"


@pytest.fixture
def clients(tmp_path, monkeypatch):
    """Create clients `one`, `two`, ... with these files and this interpreter's environment."""

    def make(*files):
        folder, envs = tmp_path / "clients", tmp_path / "envs"
        folder.mkdir()
        envs.mkdir()
        (folder / "checking.py").write_text(CHECKING.read_text())
        names = ("one", "two", "three")[: len(files)]
        for name, file in zip(names, files, strict=True):
            (folder / f"use_{name}.py").write_text(f"from checking import *\nimport subprocess, sys, time\n{file}\n")
            (envs / name).symlink_to(sys.prefix)
        monkeypatch.setattr(run, "HERE", tmp_path)
        monkeypatch.setattr(run, "CLIENTS", tuple(run.Client(name, ()) for name in names))
        monkeypatch.setattr(sys, "argv", ["run.py", "--envs", str(envs)])
        return envs

    return make


@pytest.fixture
def pip(monkeypatch):
    """Create environments whose interpreter is this shell script."""

    def make(script):
        def create(folder, **_):
            (folder / "bin").mkdir(parents=True)
            (folder / "bin" / "python").write_text(f"#!/bin/sh\n{script}\n")
            (folder / "bin" / "python").chmod(0o700)

        monkeypatch.setattr(venv, "create", create)

    return make


def check(name, result, own_fault=""):
    return f"@check({name!r}, {own_fault!r})\ndef _():\n    {result}"


def test_acceptance_names_a_known_client_fault_and_passes(clients, capsys):
    clients(check("good", "return 1"), check("its stream", "int('[DONE]')", "ValueError: invalid"))
    assert run.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "| one | ? | good | ok |" in lines
    assert any(
        line.startswith("| two | ? | its stream | the client's own fault: ValueError: invalid") for line in lines
    )
    assert lines[-1] == "1 of 2 ran, 1 not, by the client's own fault"


def test_acceptance_fails_for_another_error_than_the_known_fault(clients, capsys):
    clients(check("its stream", "raise OSError('no route')", "ValueError"))
    assert run.main() == 1
    assert "| one | ? | its stream | OSError: no route |" in capsys.readouterr().out


def test_acceptance_passes_if_the_known_fault_is_fixed(clients, capsys):
    clients(check("its stream", "return 1", "ValueError"))
    assert run.main() == 0
    assert "| one | ? | its stream | ok |" in capsys.readouterr().out


def test_acceptance_table_has_the_last_lines_of_a_failed_tool(clients, capsys):
    tool = f"return subprocess.run([sys.executable, '-c', {LINES!r}], check=True, capture_output=True)"
    clients(check("bench", tool), LINES)
    assert run.main() == 1
    out = capsys.readouterr().out
    assert re.search(r"\| one \| \? \| bench \| CalledProcessError: .*: one / two / three \|", out)
    assert "| two | ? | its file | ends with 2: one / two / three |" in out


def test_acceptance_reports_checks_before_a_timeout_and_continues(clients, capsys, monkeypatch):
    waits = "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    clients(check("first", "return 1") + "\n" + waits, check("other", "return 1"))
    for limit_s in (2, 20, 200):  # on a busy machine a client may not have started earlier
        monkeypatch.setattr(run, "TIMEOUT_S", float(limit_s))
        assert run.main() == 1
        lines = capsys.readouterr().out.splitlines()
        assert f"| one | ? | its file | took longer than {limit_s} s: no output |" in lines
        if {"| one | ? | first | ok |", "| two | ? | other | ok |"} <= {*lines}:
            return
    raise AssertionError(lines)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("echo no such package >&2; exit 1", "ends with 1: no such package"),
        ("sleep 600", "took longer than 1 s: no output"),
    ],
)
def test_acceptance_continues_after_a_failed_installation(clients, capsys, monkeypatch, pip, script, error):
    envs = clients("", check("other", "return 1"))
    (envs / "one").unlink()
    pip(script)
    monkeypatch.setattr(run, "INSTALLATION_TIMEOUT_S", 1.0 if "sleep" in script else 60.0)
    assert run.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"| one | ? | installation | {error} |" in lines
    assert "| two | ? | other | ok |" in lines
    assert not (envs / "one" / "done").exists()


def test_acceptance_continues_after_any_exception(clients, capsys, monkeypatch):
    envs = clients("", check("other", "return 1"))
    (envs / "one").unlink()

    def fail(*_, **__):
        raise ValueError("odd")

    monkeypatch.setattr(venv, "create", fail)
    assert run.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert "| one | ? | all | ValueError: odd |" in lines
    assert "| two | ? | other | ok |" in lines


def test_acceptance_installs_with_the_constraints(clients, pip):
    envs = clients("")
    (envs / "one").unlink()
    pip('echo "$@" > "$(dirname "$0")/../said"')
    run.environment(envs / "one", run.Client("one", ("guidellm",)))
    assert (envs / "one" / "said").read_text().split()[-3:] == ["-c", str(envs / "one" / "constraints.txt"), "guidellm"]
    assert (envs / "one" / "constraints.txt").read_text().splitlines() == list(run.CONSTRAINTS)
    assert (envs / "one" / "done").exists()


def test_acceptance_copies_the_script_of_an_npm_client_beside_its_packages(monkeypatch, tmp_path):
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text('#!/bin/sh\nfor last in "$@"; do :; done; echo "$last" > "$(dirname "$0")/installed"\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(npm.parent), prepend=os.pathsep)
    command = run.npm_environment(tmp_path / "npm_openai", run.Client("npm_openai", ("openai@6",)))
    assert command == ["node", "use_npm_openai.mjs"]
    assert (npm.parent / "installed").read_text() == "openai@6\n"
    assert {each.name for each in (tmp_path / "npm_openai").iterdir()} == {"checking.mjs", "use_npm_openai.mjs", "done"}


@pytest.mark.parametrize("is_there", [True, False])
def test_acceptance_runs_a_large_client_unnamed_if_its_environment_exists(clients, capsys, monkeypatch, is_there):
    envs = clients(check("bench", "return 1"))
    monkeypatch.setattr(run, "CLIENTS", (run.Client("one", (), only_by_name=True),))
    if not is_there:
        (envs / "one").unlink()
    assert run.main() == 0
    assert ("| one | ? | bench | ok |" in capsys.readouterr().out) == is_there


def test_acceptance_script_runs_the_command():
    script = Path(run.__file__).parents[2] / "scripts" / "acceptance.sh"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
