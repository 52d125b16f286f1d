import sys

import pytest
import run
from benchmarks import sampler


@pytest.fixture(autouse=True)
def restored_command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)


def test_run_list_has_one_line_for_each_benchmark(capsys):
    assert run.main(["--list"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {"load_test", "engine", "kernels", "sampler", "batching", "refusals"} <= set(lines)
    assert not set(lines) & run.NOT_EXPERIMENTS
    assert [name for name, text in lines.items() if not text.endswith(".")] == []


def test_run_passes_the_arguments_after_the_name(monkeypatch):
    given = []
    monkeypatch.setattr(sampler, "main", lambda argv: given.append(argv) or 3)
    assert run.main(["sampler", "--rows", "1"]) == 3
    assert given == [["--rows", "1"]]


def test_run_refuses_an_unknown_name_with_a_hint(capsys):
    assert run.main(["samplers"]) == 2
    assert "no benchmark is named samplers. `python performance/run.py --list`" in capsys.readouterr().err


def test_run_shows_the_help_of_an_experiment_without_matplotlib(capsys):
    with pytest.raises(SystemExit) as exit_:
        run.main(["burst", "--help"])
    assert exit_.value.code == 0
    assert "--output FOLDER" in capsys.readouterr().out
