"""WorkAgents as actors of Ray, which places them and says no more: our own frames tell who lives."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Sequence
from typing import Any, Final

from llm_serving.core.choices import SpreadName
from llm_serving.errors import ConfigError, WorkerDiedError
from llm_serving.executor.agent_host import AgentHost
from llm_serving.log import get_logger

logger = get_logger(__name__)

NAMESPACE: Final = "llm-serving"
PLACES_S: Final = 120.0
"""Seconds in which the cluster must have room for all WorkAgents at first."""
PATIENCE_S: Final = 5.0
"""For an actor that was killed; one on a machine that is gone does not end before Ray says so."""
DEVICE: Final = "NPU"
"""What Ray calls a device of Ascend."""


class RayStarter:
    """A connection to a Ray cluster, and places in it for all WorkAgents.

    Args:
        address: Of the cluster; None: one is started on this machine, for as long as this lives.
        num_replicas: Places to be taken.
        cpus: Cores of each place.
        spread: One of `SpreadName`.
        with_device: Whether each place has a device of Ascend.
        secret_file: With the cluster's secret, at the same path on every machine.
    """

    def __init__(
        self, address: str | None, num_replicas: int, cpus: int, spread: str, with_device: bool, secret_file: str
    ) -> None:
        """Raises ConfigError: Ray is not installed, there is no cluster at the address, or it has no room."""
        self._ray = import_ray()
        self._secret_file = secret_file
        self._with_device = with_device
        self._cpus = cpus
        self._connection = RayConnection(self._ray, address, num_replicas * cpus)
        try:
            bundle = {"CPU": cpus, **({DEVICE: 1} if with_device else {})}
            strategy = "SPREAD" if spread == SpreadName.SPREAD else "PACK"
            groups = importlib.import_module("ray.util.placement_group")
            self._group = groups.placement_group([bundle] * num_replicas, strategy=strategy)
            if not self._group.wait(PLACES_S):
                raise ConfigError(
                    f"cluster_config.replicas must be as many as the cluster has room for: it has {self._resources()}, "
                    f"and each takes {bundle}. Given: {num_replicas}"
                )
        except BaseException:
            self.close()
            raise
        logger.info("Ray has places for %d WorkAgents: %s", num_replicas, self._resources())

    @property
    def host(self) -> str:
        """The address by which the cluster knows this machine."""
        return str(self._ray.util.get_node_ip_address())

    def start(self, index: int, arguments: Sequence[str]) -> RayProcess:
        ray = self._ray
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        options: dict[str, Any] = {
            "max_restarts": 0,  # the supervisor starts WorkAgents again, whose connections are theirs alone
            "max_task_retries": 0,
            "num_cpus": self._cpus,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=index
            ),
        }
        if self._with_device:
            options["resources"] = {DEVICE: 1}
        try:
            actor = ray.remote(AgentHost).options(**options).remote()
            return RayProcess(ray, actor, actor.run.remote([*arguments, "--secret-file", self._secret_file]))
        except ray.exceptions.RayError as error:
            raise WorkerDiedError(f"Ray cannot start WorkAgent {index}: {error}") from error

    def close(self) -> None:
        self._connection.close()

    def _resources(self) -> str:
        found = self._ray.cluster_resources()
        nodes = sum(bool(node["Alive"]) for node in self._ray.nodes())
        devices = f", {found[DEVICE]:g} devices" if DEVICE in found else ""
        return f"{nodes} machines, {found.get('CPU', 0):g} cores{devices}"


class RayProcess:
    """A WorkAgent behind an actor."""

    def __init__(self, ray: Any, actor: Any, running: Any) -> None:
        self._ray, self._actor, self._running = ray, actor, running
        self._end: str | None = None

    @property
    def pid(self) -> int | None:
        return None

    @property
    def has_ended(self) -> bool:
        if self._end is None:
            self._look(0.0)
        return self._end is not None

    @property
    def described_end(self) -> str:
        return self._end or "unknown"

    def kill(self) -> None:
        """Ends the actor, and by that its WorkAgent: at once where Ray reaches its machine; where it does not, the
        WorkAgent finds that the master is gone."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor, no_restart=True)

    def end(self, timeout_s: float | None) -> None:
        if self._end is None:
            self._look(PATIENCE_S if timeout_s is None else timeout_s)
        self.kill()

    def _look(self, seconds: float) -> None:
        done, _ = self._ray.wait([self._running], timeout=seconds)
        if done:
            try:
                self._end = f"code {self._ray.get(self._running)}"
            except self._ray.exceptions.RayError as error:
                self._end = str(error).strip().splitlines()[0]


class RayConnection:
    """To Ray, in a thread that lives as long: the processes that Ray starts here are told to end with the thread that
    started them."""

    def __init__(self, ray: Any, address: str | None, num_cpus: int = 1) -> None:
        """Raises ConfigError: there is no cluster at the address; None: it cannot be started here."""
        self._ray = ray
        self._close, self._opened = threading.Event(), threading.Event()
        self._errors: list[Exception] = []
        self._thread = threading.Thread(target=self._live, args=(address, num_cpus), name="ray", daemon=True)
        self._thread.start()
        self._opened.wait()
        for error in self._errors:
            where = "on this machine" if address is None else f"at cluster_config.address {address}"
            raise ConfigError(f"Ray cannot be used {where}: {error}") from error

    def close(self) -> None:
        self._close.set()
        self._thread.join()

    def _live(self, address: str | None, num_cpus: int) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
        here = {"num_cpus": max(num_cpus, os.cpu_count() or 1)} if address is None else {}
        try:
            self._ray.init(
                address=address or "local", namespace=NAMESPACE, include_dashboard=False, logging_level="ERROR", **here
            )
        except Exception as error:  # noqa: BLE001 - Ray raises what comes to it: ConnectionError, RuntimeError, ValueError
            self._errors.append(error)
            return
        finally:
            self._opened.set()
        self._close.wait()
        self._ray.shutdown()


def import_ray() -> Any:
    """The package.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ConfigError(
            "`cluster_config.engine: ray` needs the package ray: pip install 'llm-serving[ray]'"
        ) from None
