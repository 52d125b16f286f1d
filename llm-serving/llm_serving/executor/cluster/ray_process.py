"""The process that connects to Ray for the master, and the actor that runs a WorkAgent on each machine.

Ray terminates a process that has lost the head node for a minute, so the master itself must not be connected.
"""

from __future__ import annotations

import importlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from llm_serving.core.enums import SpreadName
from llm_serving.errors import ChannelClosedError, ConfigError
from llm_serving.executor.cluster.ray_starter import (
    AgentEnded,
    KillAgent,
    RayCommand,
    RayConnected,
    RayReport,
    RayRequirements,
    RayUnavailable,
    StartAgent,
)
from llm_serving.executor.cluster.weight_files import StoredWeights, WeightFiles, find_cached, store_in_cache
from llm_serving.executor.placement import ProcessArguments, start_processes
from llm_serving.executor.tensor_parallel import RankProcesses
from llm_serving.transport.channel import Channel

EXIT_S: Final = 5.0
NAMESPACE: Final = "llm-serving"
PLACEMENT_TIMEOUT_S: Final = 120.0
DEVICE: Final = "NPU"
ATTEMPTS: Final = "2"
"""Number of attempts to reach a head node. Each takes at least 41 s. Ray's default is 20."""
EXIT_GRACE_S: Final = 10.0
"""Seconds after the master's exit within which this process exits, even while it waits for Ray."""
_POLL_INTERVAL_S: Final = 0.2


class AgentHost:
    """Ray actor that runs all ranks of one WorkAgent. When it exits, the ranks' standard inputs close and they exit."""

    def find_weights(self, cache: str, files: bytes) -> str | None:
        found = find_cached(cache, msgspec.json.decode(files, type=WeightFiles))
        return None if found is None else str(found)

    def store_weights(self, cache: str, files: bytes, pieces: Sequence[Any]) -> str:
        return str(store_in_cache(cache, msgspec.json.decode(files, type=WeightFiles), _fetch_pieces(pieces)))

    def run(self, ranks: Sequence[Sequence[str]]) -> str:
        """Run the ranks of a WorkAgent until one exits. Return how it exited, for example "code 3"."""
        # Ray sets OMP_NUM_THREADS to the CPUs of the actor, or to 1; the kernels are configured otherwise.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        agent = start_processes([ProcessArguments(arguments) for arguments in ranks], environment)
        processes = agent.ranks if isinstance(agent, RankProcesses) else [agent]
        with ThreadPoolExecutor(len(processes)) as waiting:
            wait([waiting.submit(process.wait) for process in processes], return_when=FIRST_COMPLETED)
            agent.wait_or_kill(EXIT_S)
        return agent.exit_description


def _fetch_pieces(pieces: Sequence[Any]) -> Iterator[memoryview]:
    ray = importlib.import_module("ray")
    for piece in pieces:
        yield memoryview(ray.get(piece))


class NotStartedError(ConfigError):
    """Ray did not start on this machine: for example, its processes took longer than Ray's limit of 15 s."""


def main(requirements_json: str, socket_fd: str) -> None:
    connection = socket.socket(fileno=int(socket_fd))
    threading.Thread(target=_exit_with_the_master, args=(connection,), name="master-watch", daemon=True).start()
    channel: Channel[RayCommand] = Channel(connection, RayCommand)  # type: ignore[arg-type]
    try:
        requirements = msgspec.json.decode(requirements_json, type=RayRequirements)
        with connect_to_ray(requirements.address, requirements.num_replicas * requirements.cpus) as ray:
            agents = RayAgents(ray, requirements, channel)
            while True:
                command = channel.receive()
                if isinstance(command, StartAgent):
                    if not agents.start(command):
                        channel.shutdown()  # lets the master start another Ray process at once
                        return
                else:
                    agents.kill(command)
    except ConfigError as error:
        channel.send(RayUnavailable(str(error), is_retryable=isinstance(error, NotStartedError)))
    except ChannelClosedError:  # the master exits, or has exited
        pass


def _exit_with_the_master(connection: socket.socket) -> None:
    """Exit after the master has exited, even while the main thread waits for a head node that does not answer."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    time.sleep(EXIT_GRACE_S)
    os._exit(1)


class RayAgents:
    """The WorkAgents of a server, each in its own Ray actor. Raise ConfigError if the cluster has no room for all."""

    def __init__(self, ray: Any, requirements: RayRequirements, channel: Channel[RayCommand]) -> None:
        self._ray, self._requirements, self._channel = ray, requirements, channel
        self._weights = None if requirements.weights is None else StoredWeights(ray, requirements.weights)
        self._lock = threading.Lock()
        self._actors: dict[int, Any] = {}
        self._running: dict[Any, int] = {}
        self._devices = {DEVICE: requirements.num_devices} if requirements.num_devices else {}
        bundle = {"CPU": requirements.cpus, **self._devices}  # on one machine, because ranks share memory
        strategy = "SPREAD" if requirements.strategy == SpreadName.SPREAD else "PACK"
        groups = importlib.import_module("ray.util.placement_group")
        self._group = groups.placement_group([bundle] * requirements.num_replicas, strategy=strategy)
        if not self._group.wait(PLACEMENT_TIMEOUT_S):
            raise ConfigError(
                f"cluster_config.replicas must fit into the Ray cluster: the cluster has {_resources(ray)}, "
                f"and each replica needs {bundle} of one machine. Given: {requirements.num_replicas} replicas"
            )
        self._report(RayConnected(str(ray.util.get_node_ip_address()), _resources(ray)))
        threading.Thread(target=self._watch, name="actors", daemon=True).start()

    def start(self, command: StartAgent) -> bool:
        """Start a WorkAgent. If Ray fails to, report to the master that this WorkAgent has ended. Return False if it
        failed and no other WorkAgent runs, because the connection to Ray may be lost.
        """
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        options: dict[str, Any] = {
            "max_restarts": 0,  # the supervisor restarts WorkAgents, with new tokens
            "max_task_retries": 0,
            "num_cpus": self._requirements.cpus,
            "resources": self._devices,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=command.index
            ),
        }
        try:
            actor = self._ray.remote(AgentHost).options(**options).remote()
            with self._lock:
                self._actors[command.number] = actor
            if self._weights is None:
                self._run(command, actor, command.ranks)
            else:
                arguments = command, actor, self._weights
                threading.Thread(target=self._send_weights_and_run, args=arguments, daemon=True).start()
        except self._ray.exceptions.RayError as error:
            with self._lock:
                self._actors.pop(command.number, None)
            self._report(AgentEnded(command.number, f"Ray cannot start the WorkAgent: {error}"))
            with self._lock:
                return bool(self._actors)
        return True

    def _run(self, command: StartAgent, actor: Any, ranks: Sequence[Sequence[str]]) -> None:
        running = actor.run.remote([[*arguments] for arguments in ranks])
        with self._lock:
            self._running[running] = command.number

    def _send_weights_and_run(self, command: StartAgent, actor: Any, weights: StoredWeights) -> None:
        try:
            path = weights.deliver(actor)
            self._run(command, actor, [(*arguments, "--model-path", path) for arguments in command.ranks])
        except Exception as error:  # noqa: BLE001  Ray also raises errors that are not RayErrors
            self.kill(KillAgent(command.number))
            self._report(AgentEnded(command.number, _first_line(error)))

    def kill(self, command: KillAgent) -> None:
        """Kill an actor and its WorkAgent. A WorkAgent that Ray cannot reach exits when it loses the master."""
        with self._lock:
            actor = self._actors.pop(command.number, None)
        if actor is not None:
            self._ray.kill(actor, no_restart=True)

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(_POLL_INTERVAL_S):
            with self._lock:
                running = list(self._running)
            if not running:
                continue
            for done in self._ray.wait(running, num_returns=len(running), timeout=0)[0]:
                with self._lock:
                    number = self._running.pop(done)
                    self._actors.pop(number, None)
                self._report(AgentEnded(number, self._exit_description(done)))

    def _exit_description(self, done: Any) -> str:
        try:
            return str(self._ray.get(done))
        except Exception as error:  # noqa: BLE001  as above
            return _first_line(error)

    def _report(self, report: RayReport) -> None:
        with self._lock:
            self._channel.send(report)


@contextmanager
def connect_to_ray(address: str | None, num_cpus: int = 1) -> Iterator[Any]:
    """Connect to Ray and yield its package. Without an address, run a cluster on this machine until the context ends.

    The calling thread must live as long as the connection, because Ray ties its processes to that thread. Raise
    ConfigError if Ray is not installed or the address has no cluster, NotStartedError if the local cluster fails.
    """
    if address is not None:
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", ATTEMPTS)  # read when the package is imported
    ray = import_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
    os.environ.setdefault("RAY_worker_niceness", "0")  # for a cluster started here; Ray's default is 15
    here = {"num_cpus": max(num_cpus, os.cpu_count() or 1)} if address is None else {}
    try:
        ray.init(
            address=address or "local", namespace=NAMESPACE, include_dashboard=False, logging_level="ERROR", **here
        )
    except Exception as error:
        if address is None:
            raise NotStartedError(f"Ray cannot be used on this machine: {error}") from error
        raise ConfigError(f"Ray cannot be used at cluster_config.address {address}: {error}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def import_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ConfigError(
            "`cluster_config.engine: ray` needs the package ray: pip install -e 'llm-serving[ray]'"
        ) from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _resources(ray: Any) -> str:
    found = ray.cluster_resources()
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    devices = f", {found[DEVICE]:g} devices" if DEVICE in found else ""
    return f"{nodes} machines, {found.get('CPU', 0):g} cores{devices}"


if __name__ == "__main__":
    main(*sys.argv[1:])
