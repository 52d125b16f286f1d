"""The process that is connected to Ray in place of the master, and what becomes of WorkAgents without it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import stand_in_ray_process
from llm_serving.errors import ConfigError
from llm_serving.executor import ray_process, ray_starter
from llm_serving.executor.ray_orders import AgentEnded, KillAgent, RayPlaces, StartAgent
from llm_serving.executor.ray_starter import RayAgent, RayStarter
from stand_in_ray_process import HANGS, NOWHERE

PLACES = RayPlaces(None, 2, 1, "spread", False)
COMMAND = (sys.executable, stand_in_ray_process.__file__)
DEADLINE_S = 20.0


@pytest.fixture(autouse=True)
def path_of_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)]))


@pytest.fixture
def starter() -> Iterator[RayStarter]:
    starter = RayStarter(PLACES, "/the/secret", COMMAND)
    yield starter
    starter.close()
    assert starter._connection._process.returncode is not None


def end_of(agent: RayAgent) -> str:
    assert agent._ended.wait(DEADLINE_S)
    assert agent.has_ended
    return agent.described_end


def test_the_end_of_a_work_agent_is_told(starter: RayStarter) -> None:
    stays, ends = starter.start(0, ["stay"]), starter.start(1, ["end"])
    assert end_of(ends) == "ended with end --secret-file /the/secret"
    assert not stays.has_ended
    stays.kill()
    assert end_of(stays) == "killed"


def test_one_that_does_not_end_is_killed(starter: RayStarter) -> None:
    agent = starter.start(0, ["stay"])
    agent.end(0.01)
    assert end_of(agent) == "killed"


def test_what_is_lost_with_ray_is_told_and_the_next_start_has_another_connection(starter: RayStarter) -> None:
    first = starter._connection
    lost = [starter.start(0, ["stay"]), starter.start(1, ["lose Ray"])]
    assert [end_of(each) for each in lost] == ["the connection to Ray is lost"] * 2
    for each in lost:
        each.kill()
        each.end(None)
    agent = starter.start(0, ["end"])
    assert end_of(agent).startswith("ended with end")
    assert starter._connection is not first
    assert first._process.returncode is not None


def test_a_start_while_there_is_no_cluster_ends_and_says_why(starter: RayStarter) -> None:
    assert end_of(starter.start(0, ["lose Ray"])) == "the connection to Ray is lost"
    starter._places = RayPlaces(NOWHERE, 2, 1, "spread", False)
    assert end_of(starter.start(0, ["end"])) == f"there is no cluster at {NOWHERE}"
    starter._places = PLACES
    assert end_of(starter.start(0, ["end"])).startswith("ended with end")


def test_a_cluster_that_cannot_be_used_is_an_error_at_the_start() -> None:
    with pytest.raises(ConfigError, match=f"there is no cluster at {NOWHERE}"):
        RayStarter(RayPlaces(NOWHERE, 2, 1, "spread", False), "/the/secret", COMMAND)


def test_one_that_does_not_let_go_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_starter, "SHUTDOWN_S", 0.05)
    starter = RayStarter(RayPlaces(HANGS, 2, 1, "spread", False), "/the/secret", COMMAND)
    starter.close()
    assert starter._connection._process.returncode is not None


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_without_the_package_it_is_told_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match=r"needs the package ray: pip install 'llm-serving\[ray\]'"):
        RayStarter(PLACES, "/the/secret")


def test_work_agents_of_a_cluster_that_is_started_here_are_as_nice_as_the_master(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_worker_niceness", "")
    monkeypatch.delenv("RAY_worker_niceness")
    at_start: dict[str, str] = {}
    ray = SimpleNamespace(init=lambda **_: at_start.update(os.environ), shutdown=lambda: None)
    monkeypatch.setattr(ray_process, "import_ray", lambda: ray)
    with ray_process.connected(None):
        assert at_start["RAY_worker_niceness"] == "0"


def test_a_connection_by_which_nothing_runs_and_nothing_starts_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class RayError(Exception):
        pass

    class Remote:
        """A class of actors, an actor and its method."""

        fails = False

        def options(self, **_: object) -> Remote:
            return self

        def remote(self, *_: object) -> Remote:
            if self.fails:
                raise RayError("WrongClusterID")
            return self

        @property
        def run(self) -> Remote:
            return self

    remote, told = Remote(), list[object]()
    ray = SimpleNamespace(
        remote=lambda _: remote,
        kill=lambda actor, no_restart: None,
        exceptions=SimpleNamespace(RayError=RayError),
        wait=lambda running, **_: ([], running),
        util=SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1"),
        cluster_resources=dict,
        nodes=list,
    )
    group = SimpleNamespace(wait=lambda seconds: True)
    of_ray = SimpleNamespace(placement_group=lambda *_, **__: group, PlacementGroupSchedulingStrategy=SimpleNamespace)
    monkeypatch.setattr(ray_process.importlib, "import_module", lambda name: of_ray)
    monkeypatch.setattr(ray_process.Agents, "_watch", lambda agents: None)
    agents = ray_process.Agents(ray, PLACES, SimpleNamespace(send=told.append))  # type: ignore[arg-type]
    assert agents.start(StartAgent(1, 0, ()))
    remote.fails = True
    assert agents.start(StartAgent(2, 1, ())), "another one runs"
    agents.kill(KillAgent(1))
    assert not agents.start(StartAgent(3, 0, ()))
    assert told[1:] == [AgentEnded(number, "Ray cannot start it: WrongClusterID") for number in (2, 3)]
