"""Record a real server under load while its WorkAgent is killed, then replay the recording.

    python tests/tools/simulated_recorded_load.py --requests 1500

Prints what the server logged about its recording and what the replay found. Exits with the replay's exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
from support.server_process import Server, metric, run_command, start_server, unwind_on_sigterm

TASKS = ("Count from 1 to 9.", "Add 17 and 25.", "Reverse the word lamp.", "Sort the words pear apple fig.")
SETTINGS = {
    "pa_config.num_blocks": 100,
    "pa_config.num_swap_blocks": 40,
    "scheduler_config.preemption_mode": "auto",
    "model_config.decode_batch_size": 24,
    "scheduler_config.max_prefill_tokens": 64,
    "device_config.num_threads": 1,
}
NUM_CLIENTS = 128


class Recording(NamedTuple):
    """What the server logged about its recording when it ended."""

    path: Path
    num_events: int
    num_decisions: int
    hash: str


def body(index: int) -> dict[str, Any]:
    prompt = " ".join([TASKS[index % len(TASKS)]] * (1 + index % 7))
    kind: dict[str, Any] = {"temperature": 0} if index % 2 else {"temperature": 0.9, "seed": index, "n": 1 + index % 3}
    return {"prompt": prompt, "max_tokens": 8 + index % 50, "priority": index % 3 - 1, "user": f"u{index % 5}", **kind}


def record(folder: Path, num_requests: int) -> Recording:
    """Record requests until all are answered; the WorkAgent is killed once."""
    settings = {**SETTINGS, "scheduler_config.record_path": folder, "scheduler_config.record_file_bytes": 2**30}
    server = start_server(*(text for key, value in settings.items() for text in ("--set", f"{key}={value}")))
    try:
        asyncio.run(_load(server, num_requests))
    finally:
        server.stop()
    found = re.search(r"replica-0: ended the recording events=(\d+) decisions=(\d+) hash=([0-9a-f]{16})", server.log)
    assert found is not None, server.log
    (path,) = folder.glob("*.rec")
    return Recording(path, int(found[1]), int(found[2]), found[3])


async def _load(server: Server, num_requests: int) -> None:
    async with asyncio.timeout(600), server.client() as client:
        slots = asyncio.Semaphore(NUM_CLIENTS)

        async def ask(index: int) -> int:
            async with slots:
                return (await client.post("/v1/completions", json=body(index))).status_code

        answers = [asyncio.create_task(ask(index)) for index in range(num_requests)]
        while await metric(client, "vllm:generation_tokens") < 2 * num_requests:
            await asyncio.sleep(0)
        server.work_agents()[0].send_signal(signal.SIGKILL)
        assert set(await asyncio.gather(*answers)) == {httpx.codes.OK}
        # the WorkAgent may have died after its last step
        while await metric(client, "llm_serving:worker_restarts") == 0:
            await asyncio.sleep(0.01)
        assert await metric(client, "llm_serving:worker_restarts") == 1


def replay(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_command("replay", str(path), *arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1500)
    num_requests = parser.parse_args().requests
    unwind_on_sigterm()
    with tempfile.TemporaryDirectory() as folder:
        recorded = record(Path(folder), num_requests)
        size = recorded.path.stat().st_size
        sys.stdout.write(
            f"{num_requests} requests answered, WorkAgent killed once; {size:,} bytes recorded\n"
            f"server log: {recorded.num_events} events, {recorded.num_decisions} decisions; hash {recorded.hash}\n"
        )
        replayed = replay(recorded.path)
        sys.stdout.write(f"replay:     {replayed.stdout.strip()}\n{replayed.stderr}exit code {replayed.returncode}\n")
        same = recorded.hash in replayed.stdout
    return replayed.returncode or int(not same)


if __name__ == "__main__":
    sys.exit(main())
