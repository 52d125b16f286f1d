"""A server on a cluster of five machines, and what happens to clusters: machines and processes die, the network is cut
in both directions or in one, is slow, loses and repeats. 32 streams run meanwhile; every answer is compared
with the one given alone.

    python tests/cluster_proof.py                  # needs ray, root, `ip` and /dev/net/tun; some fifteen minutes
    python tests/cluster_proof.py --only 'cut|slow'    # cases whose names it matches

The machines are network namespaces of this one, joined by a switch (`virtual_network.py`), so that TCP, its timers and
Ray are real: a head, the master's, and three with room for a WorkAgent each, for two replicas. Prints a table in
Markdown: the longest time that any stream told nothing, WorkAgents started again, and how many more tokens the master
took from steps than its clients were told, which is how many it would have applied twice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

import httpx
from ray_machines import HEAD, RayMachines, ray_machines
from server_process import Server, metric, start_server
from virtual_network import HERE, Link, virtual_network

NUM_STREAMS: Final = 32
NUM_TOKENS: Final = 240
MACHINES: Final = ("a", "b", "c")
CORES: Final = {HEAD: 0, HERE: 0, **dict.fromkeys(MACHINES, 1)}
NUM_REPLICAS: Final = 2
STEP_TIMEOUT_S: Final = 15
CASE_S: Final = 400.0
QUICK: Final = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""So that Ray says of a machine sooner that it is gone; docs/cluster.md recommends it."""
TASKS: Final = ("Count from 1 to 9.", "Add 17 and 25.", "Reverse the word lamp.", "Name the days of the week.")


def bodies(count: int) -> list[dict[str, Any]]:
    """The requests of the streams, all different."""
    ways: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 0.9},
        {"temperature": 0.8, "logprobs": 2},
        {"temperature": 0.7, "repetition_penalty": 1.2, "top_p": 0.9},
    )
    common = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    pairs = itertools.islice(itertools.cycle(itertools.product(TASKS, ways)), count)
    return [{**common, "prompt": task, "seed": seed, **way} for seed, (task, way) in enumerate(pairs)]


@dataclass
class Answer:
    """What a stream told, and when."""

    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    num_tokens: int = 0
    told_at: list[float] = field(default_factory=list)
    error: str | None = None

    def same_as(self, other: Answer) -> bool:
        mine, others = ((self.text, self.logprobs, self.error), (other.text, other.logprobs, other.error))
        return mine == others and self.error is None

    def silence_s(self, since: float) -> float:
        """The longest time that it told nothing, of what ended after `since`."""
        pairs = itertools.pairwise(self.told_at)
        return max((later - max(earlier, since) for earlier, later in pairs if later > since), default=0.0)


async def read(client: httpx.AsyncClient, body: dict[str, Any], answer: Answer) -> None:
    usage = {"stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", "/v1/completions", json={**body, **usage}) as response:
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                if not data.startswith("{"):
                    continue
                event = json.loads(data)
                answer.told_at.append(time.monotonic())
                if "error" in event:
                    answer.error = str(event["error"])
                for choice in event.get("choices", ()):
                    answer.text += choice["text"]
                    answer.logprobs += (choice["logprobs"] or {}).get("token_logprobs") or []
                if event.get("usage"):
                    answer.num_tokens = event["usage"]["completion_tokens"]
    except httpx.HTTPError as error:
        answer.error = repr(error)


@dataclass
class Proof:
    """The cluster, the server on it and the streams of the case."""

    machines: RayMachines
    server: Server
    client: httpx.AsyncClient

    def victim(self) -> str:
        """A machine with a WorkAgent."""
        return next(name for name in MACHINES if self.machines.work_agents(name))

    def agent_of(self, name: str) -> int:
        return self.machines.work_agents(name)[0]

    @property
    def num_agents(self) -> int:
        return sum(len(self.machines.work_agents(name)) for name in MACHINES)

    async def restarts(self) -> int:
        return int(await metric(self.client, "llm_serving:worker_restarts_total"))

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.05)

    async def until_restarted(self, before: int) -> None:
        while await self.restarts() == before:
            await asyncio.sleep(0.05)


Disturb = Callable[[Proof], Awaitable[None]]


async def kill_agent(proof: Proof) -> None:
    os.kill(proof.agent_of(proof.victim()), signal.SIGKILL)


async def hang_agent(proof: Proof) -> None:
    """It goes on when another one has its place: what it has computed comes late."""
    pid, before = proof.agent_of(proof.victim()), await proof.restarts()
    os.kill(pid, signal.SIGSTOP)
    await proof.until_restarted(before)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


async def kill_machine(proof: Proof) -> None:
    """Its kernel lives and closes the connections."""
    await _lose(proof, proof.victim())


async def lose_power(proof: Proof) -> None:
    """Nobody closes anything."""
    name = proof.victim()
    proof.machines.network.cut(name, "to", "from")
    await _lose(proof, name)


async def _lose(proof: Proof, name: str) -> None:
    before = await proof.restarts()
    await asyncio.to_thread(proof.machines.kill, name)
    await proof.until_restarted(before)
    await proof.until(lambda: proof.num_agents == NUM_REPLICAS)
    proof.machines.network.mend(name)
    await asyncio.to_thread(proof.machines.start, name, CORES[name])


def cut(*directions: Any, seconds: float | None = None) -> Disturb:
    """For so long; None: until another WorkAgent serves."""

    async def disturb(proof: Proof) -> None:
        name, before = proof.victim(), await proof.restarts()
        proof.machines.network.cut(name, *directions)
        if seconds is not None:
            await asyncio.sleep(seconds)
        else:
            await proof.until_restarted(before)
        proof.machines.network.mend(name)
        # Ray takes a machine that it has given up for dead: it ends, and is started anew as its operator would.
        if seconds is None:
            await asyncio.to_thread(proof.machines.kill, name)
            await asyncio.to_thread(proof.machines.start, name, CORES[name])

    return disturb


def slow(link: Link) -> Disturb:
    async def disturb(proof: Proof) -> None:
        name = proof.victim()
        for direction in ("to", "from"):
            proof.machines.network.set_link(name, direction, link)

    return disturb


CASES: Final[dict[str, Disturb]] = {
    "nothing": slow(Link()),
    "WorkAgent killed": kill_agent,
    "WorkAgent hangs, goes on when it was replaced": hang_agent,
    "machine lost, connections closed": kill_machine,
    "machine lost, as by power": lose_power,
    "cut in both directions": cut("to", "from"),
    "cut from the master to the machine": cut("to"),
    "cut from the machine to the master": cut("from"),
    "cut in both directions for 5 s": cut("to", "from", seconds=5.0),
    "slow link: 50 ms each way": slow(Link(delay_s=0.05)),
    "2 % of frames lost, 10 % twice and late": slow(Link(loss=0.02, duplicates=0.1)),
}


@dataclass(frozen=True)
class Row:
    case: str
    num_streams: int
    num_equal: int
    silence_s: float
    num_restarts: int
    num_twice: int

    def __str__(self) -> str:
        return (
            f"| {self.case} | {self.num_streams} | {self.num_equal} | {self.silence_s:.1f} | {self.num_restarts} | "
            f"{self.num_twice} |"
        )


HEADER: Final = (
    "| case | streams | equal bytes | longest silence of a stream, s | WorkAgents started again | applied twice |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: |"
)


async def play(proof: Proof, case: str, disturb: Disturb, alone: Sequence[Answer]) -> Row:
    """Runs the streams, disturbs when a fifth of their tokens have come, and waits until the cluster is whole."""
    generated, restarts = await _generated(proof), await proof.restarts()
    answers = [Answer() for _ in alone]
    async with asyncio.timeout(CASE_S):
        reading = asyncio.gather(
            *(read(proof.client, body, a) for body, a in zip(bodies(len(alone)), answers, strict=True))
        )
        while sum(len(answer.told_at) for answer in answers) < len(alone) * NUM_TOKENS // 5:
            await asyncio.sleep(0.005)
        since = time.monotonic()
        open_then = sum(not answer.num_tokens for answer in answers)
        await disturb(proof)
        await reading
        for name in MACHINES:
            proof.machines.network.mend(name)
        await proof.until(lambda: proof.num_agents == NUM_REPLICAS)
        while (await proof.client.get("/health")).json()["loading"]:
            await asyncio.sleep(0.1)
    assert open_then == len(alone), "a stream had ended when the case began"
    told = sum(answer.num_tokens for answer in answers)
    for answer, expected in zip(answers, alone, strict=True):
        if not answer.same_as(expected):
            sys.stderr.write(f"{case}: {answer.error or 'other bytes'}\n")
    return Row(
        case,
        len(answers),
        sum(answer.same_as(expected) for answer, expected in zip(answers, alone, strict=True)),
        max(answer.silence_s(since) for answer in answers),
        await proof.restarts() - restarts,
        await _generated(proof) - generated - told,
    )


async def _generated(proof: Proof) -> int:
    return int(await metric(proof.client, "vllm:generation_tokens_total"))


@contextlib.contextmanager
def a_server(machines: RayMachines, secret_file: Path) -> Iterator[Server]:
    settings = {
        "cluster_config.engine": "ray",
        "cluster_config.address": machines.address,
        "cluster_config.replicas": NUM_REPLICAS,
        "cluster_config.cpus_per_replica": 1,
        "cluster_config.master_host": machines.network.hosts[HERE].address,
        "cluster_config.secret_file": secret_file,
        "serving_config.step_timeout_s": STEP_TIMEOUT_S,
    }
    arguments = itertools.chain.from_iterable(("--set", f"{key}={value}") for key, value in settings.items())
    server = start_server(*arguments)
    try:
        yield server
    finally:
        server.stop()


async def prove(machines: RayMachines, server: Server, num_streams: int, pattern: str) -> bool:
    good = True
    async with server.client() as client:
        client.timeout = httpx.Timeout(CASE_S)
        proof = Proof(machines, server, client)
        alone = [Answer() for _ in range(num_streams)]
        for body, answer in zip(bodies(num_streams), alone, strict=True):
            await read(client, body, answer)
        sys.stdout.write(f"{HEADER}\n")
        for case, disturb in CASES.items():
            if re.search(pattern, case):
                row = await play(proof, case, disturb, alone)
                sys.stdout.write(f"{row}\n")
                sys.stdout.flush()
                good &= row.num_equal == row.num_streams and row.num_twice == 0
        for law in ("bound_violations", "audit_mismatch"):
            good &= await metric(client, f"llm_serving:{law}_total") == 0
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="play only cases whose name it matches")
    parser.add_argument("--streams", type=int, default=NUM_STREAMS, help=f"at once (default: {NUM_STREAMS})")
    parser.add_argument("--log", type=Path, help="where the server's log is kept")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended
    with tempfile.TemporaryDirectory(prefix="cluster-proof-") as folder, virtual_network(*CORES) as network:
        secret_file = Path(folder) / "secret"
        secret_file.write_text(secrets.token_hex(32))
        secret_file.chmod(0o600)
        with (
            ray_machines(network, Path(folder), CORES, {HEAD: QUICK}) as machines,
            a_server(machines, secret_file) as server,
        ):
            try:
                return 0 if asyncio.run(prove(machines, server, arguments.streams, arguments.only)) else 1
            finally:
                if arguments.log is not None:
                    arguments.log.write_text(server.log)


if __name__ == "__main__":
    sys.exit(main())
