"""Check that answers keep their bytes if one WorkAgent computes prompts, another one answers, and either is killed.

    python tests/tools/check_disaggregation.py                 # a real server and two WorkAgents: some minutes
    python tests/tools/check_disaggregation.py --engine ray    # needs ray: blocks are sent by TCP under TLS

A server without migration first computes each request alone. Then a server of each of these kinds gets all requests at
once, while some clients leave. The decisions of both replicas are replayed from their recordings.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
from llm_serving.core.enums import EngineName
from support.server_process import Server, metric, start_server
from tools.simulated_recorded_load import replay

SETTINGS = (
    "model_config.decode_batch_size=8",
    "scheduler_config.max_prefill_tokens=64",
    "pa_config.num_blocks=200",
    "serving_config.audit_every=4",
)
ROLES = "cluster_config.roles=[prefill, decode]"
TASKS = ("Count from 1 to 9.", "Add 17 and 25.", "Reverse the word lamp.", "Sort the words pear apple fig.")
NUM_LEAVING = 6


@dataclass(frozen=True)
class Case:
    name: str
    settings: tuple[str, ...] = ()
    kill: int | None = None
    """Replica whose WorkAgent is killed."""


CASES = (
    Case("nothing"),
    Case("WorkAgent of prompts killed", kill=0),
    Case("WorkAgent of answers killed", kill=1),
    Case("room for one short request", ("cluster_config.num_transfer_blocks=3",)),
    Case("answers have little room", ("pa_config.num_blocks=40",)),
    Case("keys and values in 8 bits", ("quant_config.kv_cache_dtype=int8",)),
    Case("speculation", ("scheduler_config.speculative_method=ngram",)),
)


def body(index: int) -> dict[str, Any]:
    prompt = " ".join([TASKS[index % len(TASKS)]] * (1 + index % 7))
    kind: dict[str, Any] = {"temperature": 0} if index % 2 else {"temperature": 0.9, "seed": index}
    if index % 5 == 0:
        kind["logprobs"] = 2
    if index % 7 == 3:
        kind["n"] = 2
    if index % 8 == 5:
        kind |= {"guided_regex": "[a-z ]{1,40}"}
    return {"prompt": prompt, "max_tokens": 8 + index % 50, "priority": index % 3 - 1, "user": f"u{index % 5}", **kind}


async def ask(client: httpx.AsyncClient, index: int) -> Any:
    response = await client.post("/v1/completions", json=body(index))
    response.raise_for_status()
    return [(each["text"], each["logprobs"], each["finish_reason"]) for each in response.json()["choices"]]


async def leave(client: httpx.AsyncClient, index: int) -> None:
    """Read as many events of a stream as its index says, then disconnect."""
    async with client.stream("POST", "/v1/completions", json=body(2 * index) | {"stream": True}) as response:
        async for _ in response.aiter_lines():
            index -= 1
            if index < 0:
                return


async def reference(server: Server, count: int) -> list[Any]:
    async with server.client() as client:
        return [await ask(client, index) for index in range(count)]


async def crowd(server: Server, case: Case, count: int) -> list[Any]:
    async with asyncio.timeout(600), server.client() as client:
        answers = [asyncio.create_task(ask(client, index)) for index in range(count)]
        leaving = [asyncio.create_task(leave(client, index)) for index in range(NUM_LEAVING)]
        while case.kill is not None and await metric(client, "vllm:generation_tokens") < 2 * count:
            await asyncio.sleep(0)
        if case.kill is not None:
            agents = server.work_agents()
            (agent,) = (each for each in agents if each.cmdline()[4] == str(case.kill))
            agent.send_signal(signal.SIGKILL)
        await asyncio.gather(*leaving)
        events = await asyncio.gather(*answers)
        while case.kill is not None and not await metric(client, "llm_serving:worker_restarts"):
            await asyncio.sleep(0.1)  # the other replica may have finished all answers meanwhile
        return events


async def figures(server: Server) -> dict[str, float]:
    async with server.client() as client:
        names = ("moved_requests", "moved_blocks", "moved_bytes", "move_seconds", "worker_restarts")
        names += ("audits", "audit_mismatch", "bound_violations")
        return {name: await metric(client, f"llm_serving:{name}") for name in names}


def start(settings: tuple[str, ...], num_agents: int) -> Server:
    return start_server(*(text for each in settings for text in ("--set", each)), num_agents=num_agents)


def play(case: Case, expected: list[Any], folder: Path, engine: str) -> bool:
    """Print the row of a case; return whether it passed."""
    roles = (ROLES, f"cluster_config.engine={engine}", f"scheduler_config.record_path={folder}")
    server = start((*SETTINGS, *roles, *case.settings), 2)
    try:
        got = asyncio.run(crowd(server, case, len(expected)))
        metrics = asyncio.run(figures(server))
    finally:
        server.stop()
    hashes = re.findall(r"replica-\d: recorded \d+ events and \d+ decisions; hash ([0-9a-f]{16})", server.log)
    replayed = [replay(path) for path in sorted(folder.glob("*.rec"))]
    same = sum(any(f"hash {each}" in one.stdout for one in replayed) for each in hashes)
    equal = sum(one == other for one, other in zip(got, expected, strict=True))
    columns = [case.name, len(expected), equal, int(metrics["moved_requests"]), int(metrics["moved_blocks"])]
    columns += [
        f"{1000 * metrics['move_seconds'] / max(metrics['moved_requests'], 1):.1f}",
        int(metrics["worker_restarts"]),
    ]
    columns += [
        int(metrics["audits"]),
        int(metrics["audit_mismatch"]),
        int(metrics["bound_violations"]),
        f"{same} of 2",
    ]
    sys.stdout.write(f"| {' | '.join(map(str, columns))} |\n")
    sys.stdout.flush()
    return equal == len(expected) and same == 2 and not metrics["audit_mismatch"] and not metrics["bound_violations"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--only", help="only the case whose name starts with this")
    parser.add_argument("--engine", choices=tuple(EngineName), default=EngineName.LOCAL)
    args = parser.parse_args()
    columns = ["case", "requests", "equal bytes", "moved", "blocks", "ms a move", "restarts", "audits", "differ"]
    columns += ["bounds broken", "decided again"]
    sys.stdout.write(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}\n")
    expected: dict[tuple[str, ...], list[Any]] = {}
    good = True
    for case in CASES:
        if args.only is not None and not case.name.startswith(args.only):
            continue
        settings = tuple(each for each in case.settings if each.startswith("quant_config"))
        if settings not in expected:
            server = start((*SETTINGS, *settings), 1)
            try:
                expected[settings] = asyncio.run(reference(server, args.requests))
            finally:
                server.stop()
        with tempfile.TemporaryDirectory() as folder:
            good &= play(case, expected[settings], Path(folder), args.engine)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
