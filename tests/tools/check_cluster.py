"""Check a server on a cluster of five machines under failures of machines, processes and links.

Machines and processes die, are stopped and lose time; the network is cut in one or both directions, is slow, loses and
duplicates packets; Ray loses its head or its memory; the master dies. Meanwhile 32 streams run, and every answer is
compared with the reference answer (batch size 1). The same runs again with replicas that have roles, where the links
that carry KV blocks break.

    python tests/tools/check_cluster.py                  # needs ray, root, `ip` and /dev/net/tun; about twenty minutes
    python tests/tools/check_cluster.py --only 'cut|slow'    # cases whose names match (`cluster_cases.py`,
                                                             # `cluster_block_cases.py`)

The machines are network namespaces of this machine, joined by a switch (`virtual_network.py`), so TCP, its timers and
Ray are real. One machine has Ray's head, one the master, and three have room for one WorkAgent each; there are two
replicas. The tool prints a table in Markdown: the longest time in which no stream received a token, the seconds until
every replica served again, WorkAgent restarts, and how many more tokens the master took from steps than its clients
received (tokens that it would have applied twice). After each case with roles, a request that needs the whole transfer
pool has to migrate, which shows that no block was leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
from support.cluster_block_cases import BLOCK_CASES, ROLES, no_block_is_leaked
from support.cluster_cases import CASES, CORES, MACHINES, MEANWHILE, NUM_REPLICAS, ClusterUnderTest, Disturb
from support.cluster_streams import Answer, bodies, read
from support.ray_machines import HEAD, RayMachines, ray_machines
from support.server_process import Server, metric, start_server
from support.virtual_network import HERE, virtual_network

NUM_STREAMS: Final = 32
NUM_TOKENS: Final = 240
STEP_TIMEOUT_S: Final = 15
CASE_S: Final = 600.0
LOOK_EVERY_S: Final = 0.1
ON_EVERY_MACHINE: Final = {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}
QUICK: Final = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""Options of Ray's head that make Ray notice a lost machine sooner; docs/guides/cluster.md recommends both."""


@dataclass(frozen=True)
class Row:
    case: str
    num_streams: int
    num_equal: int
    silence_s: float
    whole_s: float
    num_restarts: int
    num_twice: int

    def __str__(self) -> str:
        return (
            f"| {self.case} | {self.num_streams} | {self.num_equal} | {self.silence_s:.1f} | {self.whole_s:.1f} | "
            f"{self.num_restarts} | {self.num_twice} |"
        )


HEADER: Final = (
    "| case | streams | equal bytes | longest silence of a stream, s | all replicas serve after, s | "
    "WorkAgents started again | applied twice |\n| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


async def play(
    cluster: ClusterUnderTest, case: str, disturb: Disturb, reference: Sequence[Answer], num_tokens: int, share: float
) -> Row:
    """Run the streams, cause the failure at a share of their tokens, and wait until all replicas serve."""
    generated, restarts = await cluster.generated(), await cluster.restarts()
    cluster.num_masters = 1
    answers = [Answer() for _ in reference]
    asked = zip(bodies(len(reference), num_tokens), answers, strict=True)
    async with asyncio.timeout(CASE_S):
        cluster.reading = asyncio.gather(*(read(lambda: cluster.client, body, answer) for body, answer in asked))
        while sum(len(answer.received_at) for answer in answers) < share * len(reference) * num_tokens:
            await asyncio.sleep(0.005)
        since = time.monotonic()
        open_then = sum(not answer.num_tokens for answer in answers)
        watching = asyncio.create_task(_watch(cluster))
        await disturb(cluster)
        await cluster.reading
        for name in MACHINES:
            cluster.machines.network.restore(name)
            # Ray has removed the node: on a busy machine a slow link is sufficient for that
            if not cluster.machines.raylets(name):
                await cluster.renew(name)
        await cluster.until_whole()
        watching.cancel()
    assert open_then == len(reference), "a stream ended before the failure"
    served = [answer for answer in answers if cluster.num_masters == 1 or answer.received_at[-1] > cluster.master_since]
    for answer, expected in zip(answers, reference, strict=True):
        if not answer.same_as(expected):
            sys.stderr.write(f"{case}: {answer.error or 'other bytes'}\n")
    if cluster.num_masters > 1:  # the newest master has computed all unfinished answers from the start
        generated, restarts = 0, 0
    return Row(
        case,
        len(answers),
        sum(answer.same_as(expected) for answer, expected in zip(answers, reference, strict=True)),
        max(answer.silence_s(since) for answer in answers),
        max(cluster.not_serving_at - since, 0.0),
        await cluster.restarts() - restarts + (cluster.num_masters - 1) * NUM_REPLICAS,
        await cluster.generated() - generated - sum(answer.num_tokens for answer in served),
    )


async def _watch(cluster: ClusterUnderTest) -> None:
    """Record when a replica was last seen not to serve, by any master."""
    while True:
        try:
            whole = await cluster.is_whole()
        except httpx.HTTPError:
            whole = False
        if not whole:
            cluster.not_serving_at = time.monotonic()
        await asyncio.sleep(LOOK_EVERY_S)


def a_server(machines: RayMachines, folder: Path, more: Mapping[str, object]) -> Server:
    settings = {
        "cluster_config.engine": "ray",
        "cluster_config.address": machines.address,
        "cluster_config.replicas": NUM_REPLICAS,
        "cluster_config.cpus_per_replica": 1,
        "cluster_config.master_host": machines.network.hosts[HERE].address,
        "cluster_config.secret_file": folder / "secret",
        "serving_config.step_timeout_s": STEP_TIMEOUT_S,
        "serving_config.resume_streams": True,
        "serving_config.request_log": "disk",
        "serving_config.request_log_path": folder / "accepted",
        **more,
    }
    return start_server(*itertools.chain.from_iterable(("--set", f"{key}={value}") for key, value in settings.items()))


@contextlib.contextmanager
def open_cluster(machines: RayMachines, folder: Path, more: Mapping[str, object]) -> Iterator[ClusterUnderTest]:
    def start() -> Server:
        return a_server(machines, folder, more)

    server = start()
    client = server.client()
    client.timeout = httpx.Timeout(CASE_S)
    cluster = ClusterUnderTest(machines, start, server, client)
    try:
        yield cluster
    finally:
        cluster.server.stop()


async def run_cases(cluster: ClusterUnderTest, cases: Mapping[str, Disturb], num_streams: int, num_tokens: int) -> bool:
    good, with_roles = True, cases.keys() <= BLOCK_CASES.keys()
    reference = [Answer() for _ in range(num_streams)]
    for body, answer in zip(bodies(num_streams, num_tokens), reference, strict=True):
        await read(lambda: cluster.client, body, answer)
    sys.stdout.write(f"{HEADER}\n")
    for case, disturb in cases.items():
        async with MEANWHILE.get(case, contextlib.nullcontext)(cluster):
            row = await play(cluster, case, disturb, reference, num_tokens, 0.0 if with_roles else 0.2)
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
        good &= row.num_equal == row.num_streams and row.num_twice == 0
        if with_roles and not await no_block_is_leaked(cluster):
            sys.stderr.write(f"{case}: a block was leaked\n")
            good = False
    for name in ("bound_violations", "audit_mismatch"):
        good &= await metric(cluster.client, f"llm_serving:{name}_total") == 0
    await cluster.client.aclose()
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="run only cases whose names match")
    parser.add_argument("--streams", type=int, default=NUM_STREAMS, help=f"number of streams (default: {NUM_STREAMS})")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help=f"tokens of each stream (default: {NUM_TOKENS})")
    parser.add_argument("--log", type=Path, help="copy of the newest master's log")
    arguments = parser.parse_args()
    os.environ.update(ON_EVERY_MACHINE)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # unwind, so that started processes end
    with tempfile.TemporaryDirectory(prefix="check-cluster-") as name, virtual_network(*CORES) as network:
        folder = Path(name)
        environments = {each: dict(QUICK) if each == HEAD else {} for each in CORES}
        (folder / "secret").write_text(secrets.token_hex(32))
        (folder / "secret").chmod(0o600)
        with ray_machines(network, folder, CORES, environments) as machines:
            good = True
            for cases, more in ((CASES, {}), (BLOCK_CASES, ROLES)):
                chosen = {name: case for name, case in cases.items() if re.search(arguments.only, name)}
                if not chosen:
                    continue
                with open_cluster(machines, folder, more) as cluster:
                    try:
                        good &= asyncio.run(run_cases(cluster, chosen, arguments.streams, arguments.tokens))
                    finally:
                        if arguments.log is not None:
                            arguments.log.write_text(cluster.server.log)
            return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
