"""A recorded server under load, a WorkAgent killed in between: its recording is decided again on the command line."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import metric, start_server

pytestmark = pytest.mark.end_to_end

NUM_REQUESTS = 100
TASKS = ("Count from 1 to 9.", "Add 17 and 25.", "Reverse the word lamp.", "Sort the words pear apple fig.")


def body(index: int) -> dict[str, Any]:
    prompt = " ".join([TASKS[index % len(TASKS)]] * (1 + index % 7))
    kind: dict[str, Any] = {"temperature": 0} if index % 2 else {"temperature": 0.9, "seed": index, "n": 1 + index % 3}
    return {"prompt": prompt, "max_tokens": 8 + index % 50, "priority": index % 3 - 1, "user": f"u{index % 5}", **kind}


async def run_load(client: httpx.AsyncClient, kill: Any) -> None:
    async with asyncio.timeout(120):
        answers = [
            asyncio.create_task(client.post("/v1/completions", json=body(index))) for index in range(NUM_REQUESTS)
        ]
        while await metric(client, "vllm:generation_tokens") < 200:
            await asyncio.sleep(0)
        kill()
        assert {answer.status_code for answer in await asyncio.gather(*answers)} == {200}
        assert await metric(client, "llm_serving:worker_restarts") == 1


def run_replay(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llm_serving", "replay", str(path), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_recording_of_a_server_is_decided_again(tmp_path: Path) -> None:
    settings = {
        "scheduler_config.record_path": str(tmp_path),
        "pa_config.num_blocks": 100,
        "pa_config.num_swap_blocks": 40,
        "scheduler_config.preemption_mode": "auto",
        "model_config.decode_batch_size": 24,
        "scheduler_config.max_prefill_tokens": 64,
    }
    server = start_server(*(text for key, value in settings.items() for text in ("--set", f"{key}={value}")))
    try:

        async def run() -> None:
            async with server.client() as client:
                await run_load(client, lambda: server.work_agents()[0].send_signal(signal.SIGKILL))

        asyncio.run(run())
    finally:
        server.stop()
    found = re.search(r"replica-0: recorded (\d+) events and (\d+) decisions; hash ([0-9a-f]{16})", server.log)
    assert found is not None, server.log
    num_events, num_decisions, seal = found.groups()
    (path,) = tmp_path.iterdir()
    replayed = run_replay(path)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert f"{num_events} events, {num_decisions} decisions" in replayed.stdout
    assert f"every decision is the recorded one; hash {seal}" in replayed.stdout

    explained = run_replay(path, "--until", "20", "--explain")
    assert explained.returncode == 0
    assert "before step 20: " in explained.stdout and "step 20 computes" in explained.stdout

    data = path.read_bytes()
    path.write_bytes(data[:-5])
    torn = run_replay(path)
    assert torn.returncode == 0
    assert "is not complete: the recording was cut off there" in torn.stdout
    path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
    changed = run_replay(path)
    assert changed.returncode == 1
    assert re.search(r"error: .*\.rec: record \d+ at byte \d+ is damaged", changed.stderr)
