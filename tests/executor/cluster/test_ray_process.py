"""The Ray actor that runs a WorkAgent. The programs of its ranks are shell scripts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from llm_serving.executor.cluster import ray_process
from llm_serving.executor.cluster.ray_process import AgentHost

RunInstead = Callable[[str], None]


@pytest.fixture
def run_instead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunInstead:
    """Make every rank run a script; "$@" are the arguments for Python."""

    def run_instead(script: str) -> None:
        program = tmp_path / "program"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    return run_instead


def test_agent_host_returns_the_exit_description_of_the_work_agent(run_instead: RunInstead) -> None:
    run_instead('[ "$*" = "-Pm llm_serving.work_agent --index 5" ] && exit 7')
    assert AgentHost().run([["--index", "5"]]) == "code 7"


def test_agent_host_ends_all_ranks_after_the_first_exit(run_instead: RunInstead, tmp_path: Path) -> None:
    run_instead(f'case "$*" in *"--rank 1"*) exit 7;; esac; cat; echo "$*" > {tmp_path}/told_that_it_is_to_end')
    assert AgentHost().run([["a"], ["b"]]) == "rank 1: code 7"
    assert "--rank 0" in (tmp_path / "told_that_it_is_to_end").read_text()


def test_agent_host_kills_a_rank_that_does_not_exit(run_instead: RunInstead, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_process, "EXIT_S", 0.1)
    run_instead('case "$*" in *"--rank 2"*) exit 7;; esac; exec sleep 600')
    assert AgentHost().run([["a"], ["b"], ["c"]]) == "rank 2: code 7"


def test_ranks_inherit_the_same_memory_and_port(run_instead: RunInstead, tmp_path: Path) -> None:
    command = f'echo "$@" "$(readlink /proc/$$/fd/$7)" > {tmp_path}/$3'
    run_instead(f'{command}; case "$*" in *"--rank 1"*) exit 7;; esac; cat')
    AgentHost().run([["a"], ["b"]])
    first, second = ((tmp_path / name).read_text().split() for name in "ab")
    assert first[3:5] + second[3:5] == ["--rank", "0", "--rank", "1"]
    assert first[5:] == second[5:]
    assert (first[5], first[7], first[9]) == ("--ranks-fd", "--group-port", "/memfd:llm_serving_ranks")
    assert int(first[8]) > 0
