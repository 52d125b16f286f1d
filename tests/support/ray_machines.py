"""A Ray cluster on the hosts of a virtual network: one for the head, one for the master, others for WorkAgents."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
from support.virtual_network import VirtualNetwork

PORT: Final = 6379
HEAD: Final = "head"
_STORE_BYTES: Final = 80 * 2**20  # the minimum that Ray accepts
_START_S: Final = 90.0
_ATTEMPTS: Final = 3


@dataclass
class RayMachines:
    """The hosts of a Ray cluster; `ray_machines` creates them."""

    network: VirtualNetwork
    log_folder: Path
    environments: dict[str, dict[str, str]] = field(default_factory=dict)
    """Additional environment variables of each host, by name."""
    port: int = PORT
    """Port of the newest or next head."""
    _started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{self.network.hosts[HEAD].address}:{self.port}"

    def start(self, name: str, cores: int) -> None:
        """Start Ray on a host and wait until it is ready; retry if Ray gives up, as it does on a busy machine."""
        for _ in range(_ATTEMPTS):
            if self._try_to_start(name, cores):
                return
            self.kill(name)
        raise AssertionError((self.log_folder / f"{name}.log").read_text())

    def _try_to_start(self, name: str, cores: int) -> bool:
        role = ["--head", f"--port={self.port}", "--include-dashboard=false"]
        if name != HEAD:
            role = [f"--address={self.address}"]
        host = self.network.hosts[name]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *role, f"--node-ip-address={host.address}"]
        command += [f"--num-cpus={cores}", f"--object-store-memory={_STORE_BYTES}", "--block"]
        command += ["--disable-usage-stats"]
        log = self.log_folder / f"{name}.log"
        start = len(log.read_text()) if log.exists() else 0
        with log.open("ab") as output:
            process = self._started[name] = subprocess.Popen(
                host.command(command),
                env={**os.environ, **self.environments.get(name, {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while "Ray runtime started" not in log.read_text()[start:]:
            if time.monotonic() > deadline or process.poll() is not None:
                return False
            time.sleep(0.1)
        return True

    def kill(self, name: str) -> None:
        """Kill all processes of a host at once."""
        host = self.network.hosts[name]
        _kill([*(host.pids() if host.namespace else []), *self._tree(name)])
        process = self._started.pop(name, None)
        if process is not None:
            process.wait()

    def raylets(self, name: str) -> Sequence[int]:
        return [pid for pid in self.network.hosts[name].pids() if _runs(pid, "raylet/raylet")]

    def work_agents(self, name: str) -> Sequence[int]:
        return [pid for pid in self.network.hosts[name].pids() if _runs(pid, "llm_serving.work_agent")]

    def close(self) -> None:
        for name in self.network.hosts:
            self.kill(name)

    def _tree(self, name: str) -> list[int]:
        process = self._started.get(name)
        if process is None or process.poll() is not None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return [*(each.pid for each in psutil.Process(process.pid).children(recursive=True)), process.pid]
        return []


@contextlib.contextmanager
def ray_machines(
    network: VirtualNetwork, log_folder: Path, cores: dict[str, int], environments: dict[str, dict[str, str]]
) -> Iterator[RayMachines]:
    """Start Ray on hosts with these numbers of cores, the head first; `HERE` is the master's host."""
    machines = RayMachines(network, log_folder, environments)
    try:
        for name, count in cores.items():
            machines.start(name, count)
        yield machines
    finally:
        machines.close()


def _runs(pid: int, program: str) -> bool:
    try:
        return any(program in part for part in psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return False


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
