"""`llm-serving cluster` with a running server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from llm_serving.cli.main import main
from llm_serving.executor.cluster import ray_process
from support.fakes import FakeEngine
from support.http_serving import serving


def test_cluster_command_shows_and_joins_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    engine.num_running, engine.num_waiting = 2, 1
    with serving(engine) as url:
        for order in (["replicas"], ["join", "0"]):
            assert main(["cluster", *order, "--url", url]) == 0
            assert capsys.readouterr().out == "   0  serving     3 unfinished\n"


@pytest.mark.parametrize(
    ("number", "message"),
    [("0", "must not be the only replica that serves. Given: 0"), ("-1", "must be the number of a replica")],
)
def test_cluster_shows_the_servers_error(capsys: pytest.CaptureFixture[str], number: str, message: str) -> None:
    with serving(FakeEngine()) as url:
        assert main(["cluster", "drain", "--url", url, "--", number]) == 1
    assert f"400: `replica` {message}" in capsys.readouterr().err


def test_cluster_command_without_a_server_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "replicas", "--url", "http://127.0.0.1:1"]) == 1
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err


def test_cluster_status_shows_machines_their_resources_and_agents(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def machine(name: str, alive: bool, **resources: float) -> dict[str, object]:
        return {"NodeID": name, "Alive": alive, "NodeManagerAddress": f"10.0.0.{name}", "Resources": resources}

    def agent(state: str) -> dict[str, object]:
        return {"Address": {"NodeID": "1"}, "State": state, "ActorClassName": "ray.AgentHost"}

    @contextmanager
    def connect(address: str) -> Iterator[SimpleNamespace]:
        assert address == "auto"
        yield SimpleNamespace(nodes=lambda: [machine("22", False), machine("1", True, CPU=8.0, NPU=2.0)])

    state = SimpleNamespace(
        available_resources_per_node=lambda: {"1": {"CPU": 3.0, "NPU": 1.0}},
        actors=lambda: {"a": agent("ALIVE"), "b": agent("DEAD")},
    )
    for name in ("ray", "ray._private"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "ray._private.state", state)
    monkeypatch.setattr(ray_process, "connect_to_ray", connect)
    assert main(["cluster", "status"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "MACHINE    STATE  CORES FREE  DEVICES FREE  WORK AGENTS",
        "10.0.0.1   alive  3 of 8      1 of 2        1",
        "10.0.0.22  gone   0 of 0      0 of 0        0",
    ]
