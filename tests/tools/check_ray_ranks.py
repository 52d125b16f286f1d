"""Check a replica of two ranks that Ray starts, also when a rank, both ranks or the machine is lost.

    python tests/tools/check_ray_ranks.py                      # needs ray; some minutes
    python tests/tools/check_ray_ranks.py --kernels program    # one way to compute

Its answers must equal those of two ranks that the master starts. The machines are nodes of a
`ray.cluster_utils.Cluster` on this machine: a head without room, and two with room for the replica. Both kinds of
all-reduce are checked: programs, in memory that ranks share, and graphs, with MindSpore's collectives. The tool prints
a table in Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
import psutil
from support.cluster_streams import Answer, bodies, read
from support.server_process import Server, metric, start_server
from tools.check_ray_nodes import CASE_S, another_node, head_alone, nodes_with_agents

NUM_RANKS: Final = 2
KERNELS: Final = ("program", "primitives")
RESTARTS: Final = "llm_serving:worker_restarts_total"
HEADER: Final = (
    "| computed by | what happens | streams | equal bytes | serves again after, s | started again |\n"
    "| --- | --- | ---: | ---: | ---: | ---: |"
)


class Machines:
    """Nodes with room for the replica; a lost one is replaced."""

    def __init__(self, cluster: Any) -> None:
        self.address = cluster.address
        self._cluster = cluster
        self._nodes = [self._another() for _ in range(2)]

    def ranks(self) -> dict[int, int]:
        """Return the process of each rank once all have started."""
        while True:
            found = {}
            for node in nodes_with_agents(self._nodes):
                raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
                for each in raylet.children(recursive=True):
                    command = each.cmdline()
                    if "llm_serving.work_agent" in command:
                        found[int(command[command.index("--rank") + 1])] = each.pid
            if len(found) == NUM_RANKS:
                return found
            time.sleep(0.1)

    def kill_ranks(self, *ranks: int) -> None:
        pids = self.ranks()
        for rank in ranks:
            os.kill(pids[rank], signal.SIGKILL)

    def lose_one(self) -> None:
        (lost,) = nodes_with_agents(self._nodes)
        self._nodes.remove(lost)
        self._cluster.remove_node(lost, allow_graceful=False)
        self._nodes.append(self._another())

    def _another(self) -> Any:
        return another_node(self._cluster, num_cpus=NUM_RANKS)


CASES: Final[Mapping[str, Callable[[Machines], None]]] = {
    "nothing": lambda machines: None,
    "rank 0 killed": lambda machines: machines.kill_ranks(0),
    "rank 1 killed": lambda machines: machines.kill_ranks(1),
    "both ranks killed": lambda machines: machines.kill_ranks(0, 1),
    "machine lost": Machines.lose_one,
}


def a_server(kernels: str, more: Mapping[str, object]) -> Server:
    settings = {
        "cluster_config.replicas": 1,
        "cluster_config.tensor_parallel": NUM_RANKS,
        "device_config.kernels": kernels,
        "device_config.num_threads": 1,
        "pa_config.num_blocks": 128,
        "serving_config.resume_streams": True,
        "serving_config.restart_wait_s": CASE_S,
        **more,
    }
    return start_server(*itertools.chain.from_iterable(("--set", f"{key}={value}") for key, value in settings.items()))


def a_client(server: Server) -> httpx.AsyncClient:
    client = server.client()
    client.timeout = httpx.Timeout(CASE_S)
    return client


async def reference(server: Server, asked: Sequence[dict[str, Any]]) -> list[Answer]:
    """Return the answers to the prompts, computed one at a time."""
    answers = [Answer() for _ in asked]
    async with a_client(server) as client:
        for body, answer in zip(asked, answers, strict=True):
            await read(lambda: client, body, answer)
    return answers


async def run_check(
    machines: Machines, kernels: str, server: Server, asked: Sequence[dict[str, Any]], expected: Sequence[Answer]
) -> bool:
    good = True
    async with a_client(server) as client:
        for case, strike in CASES.items():
            struck, answers = strike is not CASES["nothing"], [Answer() for _ in asked]
            before = await metric(client, RESTARTS)
            async with asyncio.timeout(CASE_S):
                reading = asyncio.gather(
                    *(read(lambda: client, body, answer) for body, answer in zip(asked, answers, strict=True))
                )
                while (
                    sum(len(answer.received_at) for answer in answers) < sum(body["max_tokens"] for body in asked) / 5
                ):
                    await asyncio.sleep(0.005)
                assert not any(answer.num_tokens for answer in answers), "a stream produced tokens before the failure"
                since, serves_at = time.monotonic(), time.monotonic()
                strike(machines)  # in this thread, because Ray starts nodes only in the main thread
                while not reading.done() or (struck and await metric(client, RESTARTS) == before):
                    if (await client.get("/health")).json()["loading"]:
                        serves_at = time.monotonic()
                    await asyncio.sleep(0.05)
                await reading
            restarts = int(await metric(client, RESTARTS) - before)
            equal = sum(got.same_as(right) for got, right in zip(answers, expected, strict=True))
            for answer in answers:
                if answer.error is not None:
                    sys.stderr.write(f"{answer.error}\n")
            sys.stdout.write(
                f"| {kernels} | {case} | {len(asked)} | {equal} | {serves_at - since:.1f} | {restarts} |\n"
            )
            sys.stdout.flush()
            good &= equal == len(asked) and (restarts > 0) == struck
        good &= await metric(client, "llm_serving:bound_violations_total") == 0
    return good


def run_checks(machines: Machines, kernels: str, folder: Path, asked: Sequence[dict[str, Any]]) -> bool:
    local = a_server(kernels, {})
    try:
        expected = asyncio.run(reference(local, asked))
    finally:
        local.stop()
    on_ray = {
        "cluster_config.engine": "ray",
        "cluster_config.address": machines.address,
        "cluster_config.cpus_per_replica": NUM_RANKS,
        "cluster_config.secret_file": folder / "secret",
    }
    server = a_server(kernels, on_ray)
    try:
        return asyncio.run(run_check(machines, kernels, server, asked, expected))
    finally:
        server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", choices=KERNELS, help="only these kernels")
    parser.add_argument("--streams", type=int, default=8, help="number of streams (default: 8)")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each stream (default: 100)")
    arguments = parser.parse_args()
    cluster = head_alone()
    good = True
    with tempfile.TemporaryDirectory(prefix="ray-ranks-proof-") as name:
        folder = Path(name)
        (folder / "secret").touch(mode=0o600)
        (folder / "secret").write_text(secrets.token_hex(32))
        try:
            machines = Machines(cluster)
            sys.stdout.write(f"{HEADER}\n")
            for kernels in (arguments.kernels,) if arguments.kernels else KERNELS:
                good &= run_checks(machines, kernels, folder, bodies(arguments.streams, arguments.tokens))
        finally:
            cluster.shutdown()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
