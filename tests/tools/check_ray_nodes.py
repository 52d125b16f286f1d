"""Check a server on a Ray cluster of four nodes on this machine that loses a node while streams are read.

    python tests/tools/check_ray_nodes.py                # needs ray; about three minutes

The server has three replicas and gets its weights through the object store. The nodes are those of
`ray.cluster_utils.Cluster`: a head without room for WorkAgents, and three nodes with room for one each. A fourth node
joins before the streams. While they run, a node with a WorkAgent is lost, so that its replica restarts on the fourth.
Every answer is compared with the reference answer (batch size 1). `check_cluster.py` has machines with networks of
their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
import psutil
from support.cluster_streams import Answer, bodies, read
from support.server_process import Server, metric, start_server

NUM_REPLICAS: Final = 3
CASE_S: Final = 600.0
STORE_BYTES: Final = 80 * 2**20
ATTEMPTS: Final = 3


def nodes_with_agents(nodes: Sequence[Any]) -> list[Any]:
    raylets = {node: node.all_processes["raylet"][0].process.pid for node in nodes}
    return [node for node, pid in raylets.items() if num_agents_below(pid)]


def num_agents_below(pid: int) -> int:
    children = psutil.Process(pid).children(recursive=True)
    return sum("llm_serving.work_agent" in child.cmdline() for child in children if child.is_running())


def a_server(address: str, folder: Path) -> Server:
    settings = {
        "cluster_config.engine": "ray",
        "cluster_config.address": address,
        "cluster_config.replicas": NUM_REPLICAS,
        "cluster_config.cpus_per_replica": 1,
        "cluster_config.weights": "object_store",
        "cluster_config.weights_cache_path": folder / "kept",
        "cluster_config.secret_file": folder / "secret",
        "serving_config.resume_streams": True,
    }
    return start_server(*itertools.chain.from_iterable(("--set", f"{key}={value}") for key, value in settings.items()))


async def run_check(server: Server, cluster: Any, nodes: list[Any], num_streams: int, num_tokens: int) -> bool:
    client = server.client()
    client.timeout = httpx.Timeout(CASE_S)
    asked = bodies(num_streams, num_tokens)
    reference = [Answer() for _ in asked]
    for body, answer in zip(asked, reference, strict=True):
        await read(lambda: client, body, answer)
    spread = len(nodes_with_agents(nodes))
    nodes.append(another_node(cluster, num_cpus=1))
    answers = [Answer() for _ in asked]
    async with asyncio.timeout(CASE_S):
        reading = asyncio.gather(
            *(read(lambda: client, body, answer) for body, answer in zip(asked, answers, strict=True))
        )
        while sum(len(answer.received_at) for answer in answers) < num_streams * num_tokens // 5:
            await asyncio.sleep(0.005)
        num_open = sum(not answer.num_tokens for answer in answers)
        lost, since = nodes_with_agents(nodes)[0], time.monotonic()
        nodes.remove(lost)
        cluster.remove_node(lost, allow_graceful=False)
        await reading
        while len(nodes_with_agents(nodes)) < NUM_REPLICAS or (await client.get("/health")).json()["loading"]:
            await asyncio.sleep(0.1)
    num_equal = sum(answer.same_as(expected) for answer, expected in zip(answers, reference, strict=True))
    for answer in answers:
        if answer.error is not None:
            sys.stderr.write(f"{answer.error}\n")
    restarts = int(await metric(client, "llm_serving:worker_restarts_total"))
    violations = int(await metric(client, "llm_serving:bound_violations_total"))
    await client.aclose()
    sys.stdout.write(
        f"{NUM_REPLICAS} replicas on {spread} nodes; {num_open} of {num_streams} streams open when a node was lost; "
        f"{num_equal} of {num_streams} equal; all replicas serve after {time.monotonic() - since:.1f} s; "
        f"{restarts} WorkAgent restarts; {violations} bound violations\n"
    )
    return num_equal == num_streams and spread == NUM_REPLICAS and restarts >= 1 and not violations and num_open > 0


def head_alone() -> Any:
    """Return a `Cluster` whose head has no room for WorkAgents."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES}
    return start_with_retries(lambda: Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=True))


def another_node(cluster: Any, num_cpus: int) -> Any:
    return start_with_retries(lambda: cluster.add_node(num_cpus=num_cpus, object_store_memory=STORE_BYTES))


def start_with_retries(start: Callable[[], Any]) -> Any:
    """Retry until Ray has started: it allows its processes only 15 s, which is short on a busy machine."""
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(Exception):
            return start()
    return start()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=12, help="number of streams (default: 12)")
    parser.add_argument("--tokens", type=int, default=160, help="tokens of each stream (default: 160)")
    arguments = parser.parse_args()
    cluster = head_alone()
    with tempfile.TemporaryDirectory(prefix="ray-nodes-proof-") as name:
        folder = Path(name)
        (folder / "secret").touch(mode=0o600)
        (folder / "secret").write_text(secrets.token_hex(32))
        try:
            nodes = [another_node(cluster, num_cpus=1) for _ in range(NUM_REPLICAS)]
            server = a_server(cluster.address, folder)
            try:
                good = asyncio.run(run_check(server, cluster, nodes, arguments.streams, arguments.tokens))
            finally:
                server.stop()
            kept = [each for each in (folder / "kept").iterdir() if each.is_dir()]
            sys.stdout.write(f"weights stored once on the machine: {len(kept) == 1}\n")
        finally:
            cluster.shutdown()
    return 0 if good and len(kept) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
