"""The process that is connected to Ray in place of the master, as Ray ends whoever has lost its head for a minute.

Started by `RayStarter`, ends with it.

What runs on a machine of the cluster in place of the master: it starts a WorkAgent there, and ends with it.

What a Ray cluster consists of.
"""

from __future__ import annotations

import importlib
import os
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from llm_serving.core.enums import SpreadName
from llm_serving.errors import ChannelClosedError, ConfigError
from llm_serving.executor.cluster.ray_messages import (
    AgentEnded,
    Connected,
    KillAgent,
    Order,
    RayPlaces,
    Report,
    StartAgent,
    Unusable,
)
from llm_serving.executor.cluster.weight_files import StoredWeights, WeightFiles, keep, kept
from llm_serving.executor.placement import Given, start_processes
from llm_serving.executor.tensor_parallel import RankProcesses
from llm_serving.transport.channel import Channel

EXIT_S: Final = 5.0
"""In which ranks end when one has."""


class AgentHost:
    """An actor of Ray. It is the parent of a WorkAgent, with all its ranks, and holds the pipes whose ends tell them
    that the parent is gone."""

    def find_weights(self, cache: str, files: bytes) -> str | None:
        """Where this machine keeps the files of a model (`WeightFiles`, as JSON); None: it does not have them."""
        found = kept(cache, msgspec.json.decode(files, type=WeightFiles))
        return None if found is None else str(found)

    def take_weights(self, cache: str, files: bytes, pieces: Sequence[Any]) -> str:
        """Keeps them; `pieces` are references to what Ray has, in a list: otherwise it would bring all at once."""
        return str(keep(cache, msgspec.json.decode(files, type=WeightFiles), _brought(pieces)))

    def run(self, ranks: Sequence[Sequence[str]]) -> str:
        """Runs a WorkAgent to its end, given the arguments of each of its ranks; returns how it ended, as in "code 3".

        The first rank that ends is the end of all.
        """
        # Ray sets it to the cores it was asked for, or to one; the kernels have a number of their own.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        agent = start_processes([Given(arguments) for arguments in ranks], environment)
        processes = agent.ranks if isinstance(agent, RankProcesses) else [agent]
        with ThreadPoolExecutor(len(processes)) as waiting:
            wait([waiting.submit(process.wait) for process in processes], return_when=FIRST_COMPLETED)
            agent.end(EXIT_S)
        return agent.described_end


def _brought(pieces: Sequence[Any]) -> Iterator[memoryview]:
    ray = importlib.import_module("ray")
    for piece in pieces:
        yield memoryview(ray.get(piece))


NAMESPACE: Final = "llm-serving"
PLACES_S: Final = 120.0
"""Seconds in which the cluster must have room for all WorkAgents."""
DEVICE: Final = "NPU"
"""What Ray calls a device of Ascend."""
ATTEMPTS: Final = "2"
"""To reach a head, each of 41 s or more; Ray itself makes 20."""
END_S: Final = 10.0
"""In which this process ends with the master, whatever it waits for."""
_LOOK_EVERY_S: Final = 0.2


class NotStartedError(ConfigError):
    """Ray has not come up on this machine. It gives its own processes 15 s for that, and no more where others keep the
    cores busy or the disk is cold."""


def main(places: str, socket_fd: str) -> None:
    connection = socket.socket(fileno=int(socket_fd))
    threading.Thread(target=_end_with_the_master, args=(connection,), name="master-watch", daemon=True).start()
    channel: Channel[Order] = Channel(connection, Order)  # type: ignore[arg-type]
    try:
        wanted = msgspec.json.decode(places, type=RayPlaces)
        with connected(wanted.address, wanted.num_replicas * wanted.cpus) as ray:
            agents = Agents(ray, wanted, channel)
            while True:
                order = channel.receive()
                if isinstance(order, StartAgent):
                    if not agents.start(order):
                        channel.shutdown()  # the master opens another connection, however long this one takes to end
                        return
                else:
                    agents.kill(order)
    except ConfigError as error:
        channel.send(Unusable(str(error), again=isinstance(error, NotStartedError)))
    except ChannelClosedError:  # the master ends, or has ended
        pass


def _end_with_the_master(connection: socket.socket) -> None:
    """Also where the main thread does not notice its end, as it waits for a head that does not answer."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    time.sleep(END_S)
    os._exit(1)


class Agents:
    """WorkAgents, an actor each."""

    def __init__(self, ray: Any, wanted: RayPlaces, channel: Channel[Order]) -> None:
        """Raises ConfigError: the cluster has no room."""
        self._ray, self._wanted, self._channel = ray, wanted, channel
        self._weights = None if wanted.weights is None else StoredWeights(ray, wanted.weights)
        self._lock = threading.Lock()
        self._actors: dict[int, Any] = {}
        self._running: dict[Any, int] = {}
        """Number of the start, by what Ray gives when the actor ends."""
        self._devices = {DEVICE: wanted.num_devices} if wanted.num_devices else {}
        bundle = {"CPU": wanted.cpus, **self._devices}  # of one machine, so that ranks share its memory
        strategy = "SPREAD" if wanted.spread == SpreadName.SPREAD else "PACK"
        groups = importlib.import_module("ray.util.placement_group")
        self._group = groups.placement_group([bundle] * wanted.num_replicas, strategy=strategy)
        if not self._group.wait(PLACES_S):
            raise ConfigError(
                f"cluster_config.replicas must be as many as the cluster has room for: it has {_resources(ray)}, "
                f"and each takes {bundle} of one machine. Given: {wanted.num_replicas}"
            )
        self._tell(Connected(str(ray.util.get_node_ip_address()), _resources(ray)))
        threading.Thread(target=self._watch, name="actors", daemon=True).start()

    def start(self, order: StartAgent) -> bool:
        """False: it cannot be started, and nothing runs by this connection. It may be to a cluster that is no more,
        in whose place another one answers."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        options: dict[str, Any] = {
            "max_restarts": 0,  # the supervisor starts WorkAgents again, whose connections are theirs alone
            "max_task_retries": 0,
            "num_cpus": self._wanted.cpus,
            "resources": self._devices,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=order.index
            ),
        }
        try:
            actor = self._ray.remote(AgentHost).options(**options).remote()
            with self._lock:
                self._actors[order.number] = actor
            if self._weights is None:
                self._run(order, actor, order.ranks)
            else:
                threading.Thread(target=self._bring_and_run, args=(order, actor, self._weights), daemon=True).start()
        except self._ray.exceptions.RayError as error:
            with self._lock:
                self._actors.pop(order.number, None)
            self._tell(AgentEnded(order.number, f"Ray cannot start it: {error}"))
            with self._lock:
                return bool(self._actors)
        return True

    def _run(self, order: StartAgent, actor: Any, ranks: Sequence[Sequence[str]]) -> None:
        running = actor.run.remote([[*arguments] for arguments in ranks])
        with self._lock:
            self._running[running] = order.number

    def _bring_and_run(self, order: StartAgent, actor: Any, weights: StoredWeights) -> None:
        """Takes as long as the weights do, so it has a thread of its own."""
        try:
            path = weights.bring(actor)
            self._run(order, actor, [(*arguments, "--model-path", path) for arguments in order.ranks])
        except Exception as error:  # noqa: BLE001  Ray has errors that are none of its own; who waits is told
            self.kill(KillAgent(order.number))
            self._tell(AgentEnded(order.number, _first_line(error)))

    def kill(self, order: KillAgent) -> None:
        """Ends the actor, and by that its WorkAgent: at once where Ray reaches its machine; where it does not, the
        WorkAgent finds that the master is gone."""
        with self._lock:
            actor = self._actors.pop(order.number, None)
        if actor is not None:
            self._ray.kill(actor, no_restart=True)

    def _watch(self) -> None:
        pause = threading.Event()
        while not pause.wait(_LOOK_EVERY_S):
            with self._lock:
                running = list(self._running)
            if not running:
                continue
            for done in self._ray.wait(running, num_returns=len(running), timeout=0)[0]:
                with self._lock:
                    number = self._running.pop(done)
                    self._actors.pop(number, None)
                self._tell(AgentEnded(number, self._end_of(done)))

    def _end_of(self, done: Any) -> str:
        try:
            return str(self._ray.get(done))
        except Exception as error:  # noqa: BLE001  as above
            return _first_line(error)

    def _tell(self, report: Report) -> None:
        with self._lock:
            self._channel.send(report)


@contextmanager
def connected(address: str | None, num_cpus: int = 1) -> Iterator[Any]:
    """A connection to Ray, whose package it gives. To be used in a thread that lives as long: the processes that Ray
    starts here are told to end with the thread that started them.

    Args:
        address: Of the cluster; None: one is started on this machine, for as long as the connection lives.
        num_cpus: The cluster that is started has at least so many.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at the address.
        NotStartedError: None has come up here.
    """
    if address is not None:
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", ATTEMPTS)  # read when the package is imported
    ray = import_ray()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    os.environ.setdefault("RAY_worker_niceness", "0")  # of a cluster that is started here: 15, if nobody says otherwise
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
    """The package.

    Raises:
        ConfigError: It is not installed.
    """
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


def status_lines(address: str) -> Iterator[str]:
    """A line for each machine: address, state, cores and devices free and in all, WorkAgents.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at the address.
    """
    with connected(address) as ray:
        free = importlib.import_module("ray._private.state").available_resources_per_node()
        agents = _agents(ray)
        rows = [("MACHINE", "STATE", "CORES FREE", "DEVICES FREE", "WORK AGENTS")]
        for node in sorted(ray.nodes(), key=lambda node: (not node["Alive"], node["NodeManagerAddress"])):
            name, left = node["NodeID"], free.get(node["NodeID"], {})
            rows.append(
                (
                    node["NodeManagerAddress"],
                    "alive" if node["Alive"] else "gone",
                    _share(left, node["Resources"], "CPU"),
                    _share(left, node["Resources"], DEVICE),
                    str(agents[name]),
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()


def _share(left: dict[str, float], total: dict[str, float], name: str) -> str:
    return f"{left.get(name, 0.0):g} of {total.get(name, 0.0):g}"


def _agents(ray: Any) -> Counter[str]:
    """Living WorkAgents by machine, those of every server."""
    state = importlib.import_module("ray._private.state")
    actors = state.actors().values()
    return Counter(
        actor["Address"]["NodeID"]
        for actor in actors
        if actor["State"] == "ALIVE" and actor.get("ActorClassName", "").endswith("AgentHost")
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
