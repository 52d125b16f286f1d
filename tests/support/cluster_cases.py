"""Failures in the cluster of `check_cluster.py`.

Machines and processes die, are stopped and lose time; the network is cut; Ray loses its head or its memory; the master
dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from support.ray_machines import HEAD, RayMachines
from support.server_process import Server, metric
from support.virtual_network import HERE, Link

MACHINES: Final = ("a", "b", "c")
CORES: Final = {HEAD: 0, HERE: 0, **dict.fromkeys(MACHINES, 1)}
NUM_REPLICAS: Final = 2
SHIFTS_S: Final = {"a": 86_400, "b": -31_536_000, "c": 315_360_000}
"""Seconds by which clocks are wrong: a day ahead, a year behind, ten years ahead."""
FILL_STORE: Final = """
import sys, ray
ray.init(address=sys.argv[1], _node_ip_address=sys.argv[2], logging_level="ERROR", log_to_driver=False)
kept = [ray.put(bytes(4 * 2**20)) for _ in range(40)]  # twice what it holds: the rest goes to disk
print("full", flush=True)
sys.stdin.read()
"""


@dataclass
class ClusterUnderTest:
    """The cluster, its server, and the streams of the current case."""

    machines: RayMachines
    start_server: Callable[[], Server]
    server: Server
    client: httpx.AsyncClient
    reading: asyncio.Future[Any] | None = None
    """Done when all streams have ended; None before the first case."""
    num_masters: int = 1
    """Number of masters in this case so far."""
    master_since: float = 0.0
    """Time at which the newest master was started."""
    not_serving_at: float = 0.0
    """Time at which a replica was last seen not to serve."""

    def victim(self) -> str:
        """Return a machine with a WorkAgent."""
        return next(name for name in MACHINES if self.machines.work_agents(name))

    def agent_of(self, name: str) -> int:
        return self.machines.work_agents(name)[0]

    @property
    def num_agents(self) -> int:
        return sum(len(self.machines.work_agents(name)) for name in MACHINES)

    async def restarts(self) -> int:
        return int(await metric(self.client, "llm_serving:worker_restarts_total"))

    async def generated(self) -> int:
        """Return the generated tokens of all requests, as the current master counts them."""
        return int(await metric(self.client, "vllm:generation_tokens_total"))

    async def is_whole(self) -> bool:
        """Return whether every replica has a WorkAgent that serves."""
        health = (await self.client.get("/health")).json()
        return self.num_agents == NUM_REPLICAS and not health["loading"]

    async def until_whole(self) -> None:
        while not await self.is_whole():
            await asyncio.sleep(0.1)

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.05)

    async def until_restarted(self, before: int, count: int = 1) -> None:
        while await self.restarts() < before + count:
            await asyncio.sleep(0.05)

    async def renew(self, name: str, **environment: str) -> None:
        """Restart a machine with further environment variables, as its operator would."""
        self.machines.environments.setdefault(name, {}).update(environment)
        await asyncio.to_thread(self.machines.kill, name)
        await asyncio.to_thread(self.machines.start, name, CORES[name])


Disturb = Callable[[ClusterUnderTest], Awaitable[None]]
Meanwhile = Callable[[ClusterUnderTest], contextlib.AbstractAsyncContextManager[None]]
"""A condition that holds from before the streams start until they have ended."""


# --- processes and machines -------------------------------------------------------------------------------------------


async def kill_agent(cluster: ClusterUnderTest) -> None:
    os.kill(cluster.agent_of(cluster.victim()), signal.SIGKILL)


async def hang_agent(cluster: ClusterUnderTest) -> None:
    """Stop a WorkAgent until it has been replaced; then it continues, and its results arrive late."""
    pid, before = cluster.agent_of(cluster.victim()), await cluster.restarts()
    os.kill(pid, signal.SIGSTOP)
    await cluster.until_restarted(before)
    _send(signal.SIGCONT, pid)


async def stop_machine(cluster: ClusterUnderTest) -> None:
    """Stop all processes of a machine for 2 s; its kernel still answers."""
    pids = cluster.machines.network.hosts[cluster.victim()].pids()
    _send(signal.SIGSTOP, *pids)
    await asyncio.sleep(2.0)
    _send(signal.SIGCONT, *pids)


async def slow_machine(cluster: ClusterUnderTest) -> None:
    """Give a WorkAgent a tenth of its time until all streams have ended."""
    pid = cluster.agent_of(cluster.victim())
    assert cluster.reading is not None
    while not cluster.reading.done():
        _send(signal.SIGSTOP, pid)
        await asyncio.sleep(0.18)
        _send(signal.SIGCONT, pid)
        await asyncio.sleep(0.02)


async def kill_machine(cluster: ClusterUnderTest) -> None:
    """Kill all processes of a machine; its kernel closes the connections."""
    await _lose(cluster, cluster.victim())


async def lose_power(cluster: ClusterUnderTest) -> None:
    """Cut a machine's network and kill its processes, so that nothing closes the connections."""
    name = cluster.victim()
    cluster.machines.network.cut(name, "to", "from")
    await _lose(cluster, name)


async def _lose(cluster: ClusterUnderTest, name: str) -> None:
    before = await cluster.restarts()
    await asyncio.to_thread(cluster.machines.kill, name)
    await cluster.until_restarted(before)
    await cluster.until(lambda: cluster.num_agents == NUM_REPLICAS)
    cluster.machines.network.restore(name)
    await asyncio.to_thread(cluster.machines.start, name, CORES[name])


@contextlib.asynccontextmanager
async def clocks_differ(cluster: ClusterUnderTest) -> AsyncIterator[None]:
    """Restart one machine after the other with the wrong time of day for its WorkAgents."""
    library = Path(tempfile.mkdtemp(prefix="shifted-clock-")) / "clock.so"
    source = Path(__file__).with_name("shifted_clock.c")
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"]
    await asyncio.to_thread(subprocess.run, command, check=True)
    for name, shift_s in SHIFTS_S.items():
        await cluster.renew(name, LD_PRELOAD=str(library), SHIFTED_CLOCK_S=str(shift_s))
        await cluster.until_whole()
    yield


# --- the network ------------------------------------------------------------------------------------------------------


def cut(*directions: Any, seconds: float | None = None) -> Disturb:
    """Cut the network of a machine for some seconds, or, if `seconds` is None, until another WorkAgent serves."""

    async def disturb(cluster: ClusterUnderTest) -> None:
        name, before = cluster.victim(), await cluster.restarts()
        cluster.machines.network.cut(name, *directions)
        if seconds is not None:
            await asyncio.sleep(seconds)
        else:
            await cluster.until_restarted(before)
        cluster.machines.network.restore(name)
        # Ray does not accept a machine again that it considers dead: it must be restarted.
        if seconds is None:
            await cluster.renew(name)

    return disturb


def slow(link: Link) -> Disturb:
    async def disturb(cluster: ClusterUnderTest) -> None:
        name = cluster.victim()
        for direction in ("to", "from"):
            cluster.machines.network.set_link(name, direction, link)

    return disturb


# --- Ray --------------------------------------------------------------------------------------------------------------


async def lose_head(cluster: ClusterUnderTest) -> None:
    """Kill the head; head and machines are restarted when the streams have ended."""
    await asyncio.to_thread(cluster.machines.kill, HEAD)
    assert cluster.reading is not None
    await asyncio.wait([cluster.reading])
    await _renew_all(cluster)


async def lose_head_and_agent(cluster: ClusterUnderTest) -> None:
    """Kill the head and a WorkAgent, which cannot be restarted without a head; the other one serves, and the server
    reports the loss.
    """
    await asyncio.to_thread(cluster.machines.kill, HEAD)
    before = await cluster.generated()
    await kill_agent(cluster)
    await asyncio.sleep(10.0)
    response = await cluster.client.get("/health")
    health = response.json()
    assert response.status_code == 200 and health["loading"], f"{response.status_code} {health}"
    assert re.fullmatch(r"WorkAgent \d .+", health["detail"]), health
    assert await cluster.generated() > before, "no stream continues"
    sys.stderr.write(f"without a head /health returns: {health['detail']}\n")
    await _renew_all(cluster)


async def lose_head_for_long(cluster: ClusterUnderTest) -> None:
    """Keep the head dead until Ray has stopped every machine because of that, a minute later."""
    await asyncio.to_thread(cluster.machines.kill, HEAD)
    await kill_agent(cluster)
    await cluster.until(lambda: not cluster.num_agents and not any(map(cluster.machines.raylets, MACHINES)))
    await _renew_all(cluster)


async def move_head(cluster: ClusterUnderTest) -> None:
    """Restart the head at another port, and the master with that address and its log of accepted requests."""
    await asyncio.to_thread(cluster.machines.kill, HEAD)
    cluster.machines.port += 1
    await _renew_all(cluster)
    await kill_master(cluster)


async def _renew_all(cluster: ClusterUnderTest) -> None:
    """Restart all machines: Ray starts no second head while machines of the first are visible."""
    for name in CORES:
        await asyncio.to_thread(cluster.machines.kill, name)
    for name in CORES:
        await cluster.renew(name)


@contextlib.asynccontextmanager
async def stores_full(cluster: ClusterUnderTest) -> AsyncIterator[None]:
    """Fill the object stores of the master's machine and of the WorkAgents' machines."""
    full = []
    try:
        for name in (HERE, *MACHINES):
            host = cluster.machines.network.hosts[name]
            command = host.command([sys.executable, "-c", FILL_STORE, cluster.machines.address, host.address])
            full.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        for process in full:
            assert process.stdout is not None
            line = await asyncio.to_thread(process.stdout.readline)
            assert line == "full\n", line
        yield
    finally:
        for process in full:
            await asyncio.to_thread(process.communicate)


# --- the master -------------------------------------------------------------------------------------------------------


async def kill_master(cluster: ClusterUnderTest) -> None:
    """Kill the master and start another one with the same log of accepted requests; clients resume there."""
    cluster.server.processes[0].kill()
    await asyncio.to_thread(cluster.server.processes[0].wait)
    cluster.master_since = time.monotonic()
    cluster.server = await asyncio.to_thread(cluster.start_server)
    timeout, cluster.client = cluster.client.timeout, cluster.server.client()
    cluster.client.timeout = timeout
    cluster.num_masters += 1


def _send(sent: signal.Signals, *pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sent)


CASES: Final[dict[str, Disturb]] = {
    "nothing": slow(Link()),
    "WorkAgent killed": kill_agent,
    "WorkAgent hangs, continues when it was replaced": hang_agent,
    "machine stopped for 2 s": stop_machine,
    "machine ten times slower": slow_machine,
    "machine lost, connections closed": kill_machine,
    "machine lost, as by power": lose_power,
    "cut in both directions": cut("to", "from"),
    "cut from the master to the machine": cut("to"),
    "cut from the machine to the master": cut("from"),
    "cut in both directions for 5 s": cut("to", "from", seconds=5.0),
    "slow link: 50 ms each way": slow(Link(delay_s=0.05)),
    "2 % of frames lost, 10 % twice and late": slow(Link(loss=0.02, duplicates=0.1)),
    "object stores full, WorkAgent killed": kill_agent,
    "clocks apart by days and years, WorkAgent killed": kill_agent,
    "master killed": kill_master,
    "Ray's head lost": lose_head,
    "Ray's head and a WorkAgent lost": lose_head_and_agent,
    "Ray's head comes back at another port": move_head,
    "Ray's head lost for over a minute, and a WorkAgent": lose_head_for_long,
}
MEANWHILE: Final[dict[str, Meanwhile]] = {
    "object stores full, WorkAgent killed": stores_full,
    "clocks apart by days and years, WorkAgent killed": clocks_differ,
}
