"""The process that is connected to Ray on behalf of the master."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import support.fake_ray_process
from llm_serving.errors import ConfigError, WorkerDiedError
from llm_serving.executor.cluster import ray_process, ray_starter
from llm_serving.executor.cluster.ray_starter import (
    AgentEnded,
    KillAgent,
    RayAgent,
    RayRequirements,
    RayStarter,
    StartAgent,
)
from support.fake_ray_process import HANGS, NOT_YET, NOWHERE

PLACES = RayRequirements(None, 2, 1, "spread", 0)
COMMAND = (sys.executable, support.fake_ray_process.__file__)
DEADLINE_S = 20.0


@pytest.fixture(autouse=True)
def path_of_the_fake_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)]))


@pytest.fixture
def starter() -> Iterator[RayStarter]:
    starter = RayStarter(PLACES, "/the/secret", COMMAND)
    yield starter
    starter.close()
    assert starter._connection._process.returncode is not None


def end_of(agent: RayAgent) -> str:
    assert agent._exited.wait(DEADLINE_S)
    assert agent.has_exited
    return agent.exit_description


def test_ray_starter_reports_the_exit_of_a_work_agent(starter: RayStarter) -> None:
    stays, ends = starter.start(0, [["stay"]]), starter.start(1, [["end"]])
    assert end_of(ends) == "ended with end --secret-file /the/secret"
    assert not stays.has_exited
    stays.kill()
    assert end_of(stays) == "killed"


def test_ray_starter_kills_an_actor_that_does_not_exit(starter: RayStarter) -> None:
    agent = starter.start(0, [["stay"]])
    agent.wait_or_kill(0.01)
    assert end_of(agent) == "killed"


def test_ray_starter_reconnects_after_a_lost_connection(starter: RayStarter) -> None:
    first = starter._connection
    lost = [starter.start(0, [["stay"]]), starter.start(1, [["lose Ray"]])]
    assert [end_of(each) for each in lost] == ["the connection to Ray is lost"] * 2
    for each in lost:
        each.kill()
        each.wait_or_kill(None)
    agent = starter.start(0, [["end"]])
    assert end_of(agent).startswith("ended with end")
    assert starter._connection is not first
    assert first._process.returncode is not None


def test_ray_starter_survives_a_lack_of_threads(starter: RayStarter, monkeypatch: pytest.MonkeyPatch) -> None:
    assert end_of(starter.start(0, [["lose Ray"]])) == "the connection to Ray is lost"

    def fail(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    started, really = list[Any](), subprocess.Popen

    def note(*given: Any, **more: Any) -> Any:
        started.append(really(*given, **more))
        return started[-1]

    with monkeypatch.context() as without_threads:
        without_threads.setattr(Thread, "start", fail)
        without_threads.setattr(subprocess, "Popen", note)
        with pytest.raises(WorkerDiedError, match="WorkAgent 0 cannot be started: can't start new thread"):
            starter.start(0, [["end"]])
    assert [each.returncode is None for each in started] == [False]
    assert end_of(starter.start(0, [["end"]])).startswith("ended with end")


def test_a_start_without_a_cluster_fails_with_the_reason(starter: RayStarter) -> None:
    assert end_of(starter.start(0, [["lose Ray"]])) == "the connection to Ray is lost"
    starter._requirements = RayRequirements(NOWHERE, 2, 1, "spread", 0)
    assert end_of(starter.start(0, [["end"]])) == f"there is no cluster at {NOWHERE}"
    starter._requirements = PLACES
    assert end_of(starter.start(0, [["end"]])).startswith("ended with end")


def test_an_unusable_cluster_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=f"there is no cluster at {NOWHERE}"):
        RayStarter(RayRequirements(NOWHERE, 2, 1, "spread", 0), "/the/secret", COMMAND)


def test_a_failed_start_of_ray_is_retried(tmp_path: Path) -> None:
    starter = RayStarter(
        RayRequirements(f"{NOT_YET}{tmp_path / 'attempts'}", 2, 1, "spread", 0), "/the/secret", COMMAND
    )
    assert end_of(starter.start(0, [["end"]])).startswith("ended with end")
    starter.close()
    assert len((tmp_path / "attempts").read_text().split()) == 2


def test_attempts_to_start_ray_are_limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ray_starter, "ATTEMPTS", 1)
    with pytest.raises(ConfigError, match="it has not come up"):
        RayStarter(RayRequirements(f"{NOT_YET}{tmp_path / 'attempts'}", 2, 1, "spread", 0), "/the/secret", COMMAND)


def test_the_error_of_ray_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SimpleNamespace(init=lambda **_: 1 / 0)
    monkeypatch.setattr(ray_process, "import_ray", lambda: ray)
    with pytest.raises(ray_process.NotStartedError, match="Ray cannot be used on this machine: division by zero"):
        ray_process.connect_to_ray(None).__enter__()
    with pytest.raises(ConfigError, match=r"Ray cannot be used at cluster_config\.address") as caught:
        ray_process.connect_to_ray(NOWHERE).__enter__()
    assert not isinstance(caught.value, ray_process.NotStartedError)


def test_a_ray_process_that_waits_for_a_head_exits_with_the_master() -> None:
    program = (
        "import signal, sys; from llm_serving.executor import ray_process; ray_process.END_S = 0.01\n"
        "ray_process.connected = lambda *_: signal.pause(); ray_process.main(*sys.argv[1:])"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", program, msgspec.json.encode(PLACES).decode(), str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))
    try:
        assert process.wait(DEADLINE_S) == 1
    finally:
        process.kill()


def test_close_kills_a_ray_process_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_starter, "SHUTDOWN_S", 0.05)
    starter = RayStarter(RayRequirements(HANGS, 2, 1, "spread", 0), "/the/secret", COMMAND)
    starter.close()
    assert starter._connection._process.returncode is not None


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed")
def test_a_missing_ray_package_is_reported_with_the_install_command() -> None:
    with pytest.raises(ConfigError, match=r"needs the package ray: pip install -e 'llm-serving\[ray\]'"):
        RayStarter(PLACES, "/the/secret")


def test_work_agents_of_a_local_cluster_have_the_masters_niceness(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_worker_niceness", "")
    monkeypatch.delenv("RAY_worker_niceness")
    at_start: dict[str, str] = {}
    ray = SimpleNamespace(init=lambda **_: at_start.update(os.environ), shutdown=lambda: None)
    monkeypatch.setattr(ray_process, "import_ray", lambda: ray)
    with ray_process.connect_to_ray(None):
        assert at_start["RAY_worker_niceness"] == "0"


class RayError(Exception):
    pass


class FakeRay:
    """A fake of the package with everything that `RayAgents` uses: also the class of actors, an actor, its method."""

    exceptions = SimpleNamespace(RayError=RayError)
    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    PlacementGroupSchedulingStrategy = SimpleNamespace

    def __init__(self, has_room: bool = True) -> None:
        self.fails = False
        self.bundles: list[dict[str, int]] = []
        self.requested: list[dict[str, Any]] = []
        """Options of each actor."""
        self.given: list[Any] = []
        """Arguments of all remote calls."""
        self._has_room = has_room

    def placement_group(self, bundles: list[dict[str, int]], strategy: str) -> SimpleNamespace:
        self.bundles = bundles
        return SimpleNamespace(wait=lambda seconds: self._has_room)

    def options(self, **options: Any) -> FakeRay:
        self.requested.append(options)
        return self

    def remote(self, *given: Any) -> FakeRay:
        if self.fails:
            raise RayError("WrongClusterID")
        self.given += given
        return self

    @property
    def run(self) -> FakeRay:
        return self

    def kill(self, actor: FakeRay, no_restart: bool) -> None:
        pass

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 4.0}

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": True}]


def agents_of(
    ray: FakeRay, places: RayRequirements, sent: list[object], monkeypatch: pytest.MonkeyPatch
) -> ray_process.RayAgents:
    monkeypatch.setattr(ray_process.importlib, "import_module", lambda name: ray)
    monkeypatch.setattr(ray_process.RayAgents, "_watch", lambda agents: None)
    return ray_process.RayAgents(ray, places, SimpleNamespace(send=sent.append))  # type: ignore[arg-type]


def test_ray_connection_is_abandoned_if_nothing_runs_or_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, sent = FakeRay(), list[object]()
    agents = agents_of(ray, PLACES, sent, monkeypatch)
    assert agents.start(StartAgent(1, 0, ((),)))
    ray.fails = True
    assert agents.start(StartAgent(2, 1, ((),))), "another one runs"
    agents.kill(KillAgent(1))
    assert not agents.start(StartAgent(3, 0, ((),)))
    assert sent[1:] == [AgentEnded(number, "Ray cannot start the WorkAgent: WrongClusterID") for number in (2, 3)]


def test_every_error_of_ray_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray also raises other errors: OSError for a lost store, ValueError for an unknown object."""

    def fail(error: Exception) -> Any:
        raise error

    ray, sent = FakeRay(), list[object]()
    agents = agents_of(ray, PLACES, sent, monkeypatch)
    weights: Any = SimpleNamespace(deliver=lambda actor: fail(OSError("Broken pipe")))
    agents._send_weights_and_run(StartAgent(1, 0, ((),)), ray, weights)
    assert sent[1:] == [AgentEnded(1, "Broken pipe")]
    ray.get = lambda done: fail(ValueError())  # type: ignore[attr-defined]
    assert agents._exit_description("done") == "ValueError"


def test_all_ranks_of_a_replica_run_in_one_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    agents = agents_of(ray, RayRequirements(None, 2, 8, "spread", 4), [], monkeypatch)
    assert ray.bundles == [{"CPU": 8, "NPU": 4}] * 2
    assert agents.start(StartAgent(1, 1, (("a",), ("b",))))
    (options,) = ray.requested
    assert (options["num_cpus"], options["resources"]) == (8, {"NPU": 4})
    assert options["scheduling_strategy"].placement_group_bundle_index == 1
    assert ray.given[-1] == [["a"], ["b"]]


def test_a_cluster_without_room_is_reported_with_the_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = "the cluster has 1 machines, 4 cores, and each replica needs {'CPU': 8} of one machine. Given: 2 replicas"
    with pytest.raises(ConfigError, match=re.escape(rule)):
        agents_of(FakeRay(has_room=False), RayRequirements(None, 2, 8, "spread", 0), [], monkeypatch)
