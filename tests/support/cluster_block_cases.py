"""Failures of the connections that carry KV blocks in the cluster of `check_cluster.py`, whose replicas have roles.

A connection is cut in the middle of a frame, in one or both directions, is slow, or is reset.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import psutil
from support.cluster_cases import MACHINES, ClusterUnderTest, Disturb
from support.server_process import metric
from support.virtual_network import CUT, Break, Link

PREFILL: Final = 0
DECODE: Final = 1
POOL_BLOCKS: Final = 8
BLOCK_SIZE: Final = 16
ROLES: Final = {"cluster_config.roles": "[prefill, decode]", "cluster_config.num_transfer_blocks": POOL_BLOCKS}
"""Settings of replicas with roles. There are so few blocks that requests migrate while other streams run."""
MID_FRAME: Final = 20_000
"""Bytes after which a connection breaks; a frame has at least 41 KB."""


async def break_blocks(cluster: ClusterUnderTest, index: int, planned: Break, seconds: float | None = None) -> None:
    """Return a case that breaks the connection of a replica in its next frame, for some seconds or permanently."""
    network, host = cluster.machines.network, _machine_of(cluster, index)
    port = _blocks_port(cluster, host, index)
    network.set_break(host, port, replace(planned))
    while network.bytes_before_break(host, port) > 0:
        await asyncio.sleep(0.01)
    if seconds is not None:
        await asyncio.sleep(seconds)
        network.restore_connection(host, port)


async def no_block_is_leaked(cluster: ClusterUnderTest) -> bool:
    """Return whether a request that needs the whole transfer pool can migrate."""
    before = await metric(cluster.client, "llm_serving:moved_blocks_total")
    prompt = list(range(300, 300 + POOL_BLOCKS * BLOCK_SIZE - 3))
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    (await cluster.client.post("/v1/completions", json=body)).raise_for_status()
    return await metric(cluster.client, "llm_serving:moved_blocks_total") == before + POOL_BLOCKS


def _machine_of(cluster: ClusterUnderTest, index: int) -> str:
    return next(name for name in MACHINES if _agent(cluster, name, index) is not None)


def _agent(cluster: ClusterUnderTest, name: str, index: int) -> psutil.Process | None:
    for pid in cluster.machines.work_agents(name):
        process = psutil.Process(pid)
        if (command := process.cmdline())[command.index("--index") + 1] == str(index):
            return process
    return None


def _blocks_port(cluster: ClusterUnderTest, name: str, index: int) -> int:
    """Return the port of the WorkAgent's later connection to the master, which carries blocks."""
    process = _agent(cluster, name, index)
    assert process is not None
    command = process.cmdline()
    master = int(command[command.index("--connect") + 1].rpartition(":")[2])
    ports: dict[str, int] = {}
    for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[2].rpartition(":")[2], 16) == master:
            ports[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    opened = sorted(Path(f"/proc/{process.pid}/fd").iterdir(), key=lambda path: int(path.name))
    _, of_blocks = (ports[name] for path in opened if (name := _target(path)) in ports)
    return of_blocks


def _target(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):  # closed meanwhile
        return str(path.readlink())
    return ""


def _case(index: int, planned: Break, seconds: float | None = None) -> Disturb:
    return partial(break_blocks, index=index, planned=planned, seconds=seconds)


BLOCK_CASES: Final[dict[str, Disturb]] = {
    "blocks: nothing": _case(DECODE, Break(0, Link())),
    "blocks: link of prompts cut in both directions": _case(PREFILL, Break(MID_FRAME)),
    "blocks: link of prompts cut from the machine to the master": _case(PREFILL, Break(MID_FRAME, CUT, ("from",))),
    "blocks: link of answers cut in both directions": _case(DECODE, Break(MID_FRAME)),
    "blocks: link of answers cut from the master to the machine": _case(DECODE, Break(MID_FRAME, CUT, ("to",))),
    "blocks: link of answers cut from the machine to the master": _case(DECODE, Break(MID_FRAME, CUT, ("from",))),
    "blocks: link of prompts cut for 5 s": _case(PREFILL, Break(MID_FRAME), 5.0),
    "blocks: link of answers cut for 5 s": _case(DECODE, Break(MID_FRAME), 5.0),
    "blocks: slow link of prompts, 200 ms each way": _case(PREFILL, Break(MID_FRAME, Link(delay_s=0.2))),
    "blocks: slow link of answers, 200 ms each way": _case(DECODE, Break(MID_FRAME, Link(delay_s=0.2))),
    "blocks: link of answers loses 5 %, repeats 10 %": _case(DECODE, Break(MID_FRAME, Link(loss=0.05, duplicates=0.1))),
    "blocks: link of prompts reset in a frame": _case(PREFILL, Break(MID_FRAME, Link(), resets=True)),
    "blocks: link of answers reset in a frame": _case(DECODE, Break(MID_FRAME, Link(), resets=True)),
}
