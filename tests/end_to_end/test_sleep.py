"""Pause, sleep and new weights of a real server: answers equal those given before, or with these weights alone."""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from llm_serving import demo_model
from llm_serving.recording.records import Noted
from llm_serving_tools.recordings.reader import Reader
from support.server_process import ONE_THREAD, Server, metric, start_server

pytestmark = pytest.mark.end_to_end

NUM_REQUESTS = 8
DEMO = Path(demo_model.__file__).parent


def write_version(folder: Path, layer: int) -> None:
    """Copy the demo model, with the output of one layer's attention set to zero."""
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("__*"))
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    (size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + size])
    begin, end = (8 + size + each for each in header[f"model.layers.{layer}.self_attn.o_proj.weight"]["data_offsets"])
    content[begin:end] = bytes(end - begin)
    path.write_bytes(content)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    write_version(tmp_path / "versions" / "one", 0)
    write_version(tmp_path / "versions" / "two", 1)
    shutil.copytree(tmp_path / "versions" / "two", tmp_path / "versions" / "wider")
    config = tmp_path / "versions" / "wider" / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps"', '"rms_norm_epsilon"'))
    settings = (
        f"model_config.weights_folder={tmp_path / 'versions'}",
        f"scheduler_config.record_path={tmp_path / 'records'}",
        "pa_config.num_blocks=4096",
        "model_config.decode_batch_size=8",
        "model_config.max_generate_length=1024",
        "device_config.device_target=CPU",
        ONE_THREAD,
    )
    model = "--model", str(tmp_path / "versions" / "one")
    server = start_server(*model, *[part for each in settings for part in ("--set", each)])
    yield server
    server.stop()


def body(number: int) -> dict[str, Any]:
    return {
        "prompt": f"Count from {number} to {number + 9}.",
        "max_tokens": 150 + number,
        "temperature": 1.0,
        "seed": number,
        "ignore_eos": True,
    }


async def ask(client: httpx.AsyncClient, number: int, **fields: Any) -> str:
    response = await client.post("/v1/completions", json=body(number) | fields)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


async def load(client: httpx.AsyncClient) -> list[str]:
    return await asyncio.gather(*(ask(client, number) for number in range(NUM_REQUESTS)))


async def running(client: httpx.AsyncClient) -> list[asyncio.Task[str]]:
    """Return requests that the server has accepted; at least one was running."""
    ended = await metric(client, "vllm:request_success_total")
    tasks = [asyncio.create_task(ask(client, number)) for number in range(NUM_REQUESTS)]
    while True:
        num_accepted = await metric(client, "vllm:request_success_total") - ended
        num_running = await metric(client, "vllm:num_requests_running")
        num_accepted += num_running + await metric(client, "vllm:num_requests_waiting")
        if num_accepted == NUM_REQUESTS and num_running:
            return tasks
        assert not all(task.done() for task in tasks), "none was seen running"


async def post(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    response = await client.post(path)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def weights_of_receipt(client: httpx.AsyncClient) -> str:
    response = await client.post("/v1/completions", json=body(0) | {"receipt": True})
    weights: str = response.json()["receipt"]["weights"]
    return weights


def notes_in(folder: Path) -> list[str]:
    notes = []
    for path in sorted(folder.glob("*.rec")):
        with path.open("rb") as file:
            notes += [entry.record.text for entry in Reader(file) if isinstance(entry.record, Noted)]
    return notes


def resident(server: Server) -> int:
    return sum(process.memory_info().rss for process in server.work_agents())


def test_requests_survive_pause_and_sleep_and_memory_is_freed(server: Server) -> None:
    async def run() -> None:
        async with asyncio.timeout(300), server.client() as client:
            alone = [await ask(client, number) for number in range(NUM_REQUESTS)]
            tasks = await running(client)
            assert (await post(client, "/v1/pause?running=freeze"))["state"] == "the model is paused"
            steps = await metric(client, "llm_serving:steps_total")
            waits = asyncio.create_task(ask(client, 3))
            assert (await client.get("/health")).status_code == 503
            assert await metric(client, "llm_serving:steps_total") == steps
            await post(client, "/v1/resume")
            assert await asyncio.gather(*tasks) == alone
            assert await waits == alone[3]

            prompts = [[3 + (each + number) % 2000 for number in range(900)] for each in range(32)]
            await asyncio.gather(*(ask(client, 0, prompt=prompt, max_tokens=1) for prompt in prompts))
            committed = await metric(client, "llm_serving:kv_cache_committed_bytes")
            before = resident(server)
            tasks = await running(client)
            slept = await post(client, "/v1/sleep?level=1&running=freeze")
            assert slept == {"is_sleeping": True, "level": 1, "state": "the model sleeps at level 1"}
            freed = before - resident(server)
            assert committed > 20e6 and freed > 0.9 * committed
            await post(client, "/v1/wake_up")
            assert await asyncio.gather(*tasks) == alone

            tasks = await running(client)
            assert (await post(client, "/v1/sleep?level=2&new_requests=refuse"))["level"] == 2
            assert await asyncio.gather(*tasks) == alone, "they finish first"
            assert server.work_agents() == [], "the system has all memory of the WorkAgent"
            refused = await client.post("/v1/completions", json=body(0))
            assert refused.status_code == 503
            assert "the model sleeps at level 2; new requests are refused" in refused.json()["error"]["message"]
            assert (await client.get("/v1/is_sleeping")).json()["is_sleeping"]
            assert not (await post(client, "/v1/wake_up"))["is_sleeping"]
            assert await load(client) == alone

    asyncio.run(run())


def test_weights_are_replaced_in_place(server: Server, tmp_path: Path) -> None:
    async def run() -> None:
        async with asyncio.timeout(300), server.client() as client:
            alone = [await ask(client, number) for number in range(NUM_REQUESTS)]
            one = await weights_of_receipt(client)
            tasks = await running(client)
            update = asyncio.create_task(post(client, "/v1/update_weights?version=two"))
            while not (await client.get("/v1/is_sleeping")).json()["state"]:
                await asyncio.sleep(0.005)
            later = [asyncio.create_task(ask(client, number)) for number in range(NUM_REQUESTS)]
            assert await asyncio.gather(*tasks) == alone, "accepted requests have the former weights"
            hashes = [(await update)["weights"]]
            assert hashes[0] == await weights_of_receipt(client) != one
            two = await load(client)
            assert two != alone
            assert await asyncio.gather(*later) == two, "requests that waited have the new weights"
            for name, error in (
                ("wider", "`rms_norm_eps` of config.json must be"),
                ("three", "must be the name of a folder in model_config.weights_folder"),
                ("../versions/one", "must be 1 to 128 letters"),
            ):
                refused = await client.post("/v1/update_weights", params={"version": name})
                assert refused.status_code == 400 and error in refused.json()["error"]["message"], refused.text
            await post(client, "/v1/sleep?level=2")
            hashes.append((await post(client, "/v1/update_weights?version=one"))["weights"])
            await post(client, "/v1/wake_up")
            assert await load(client) == alone
            assert hashes[1] == await weights_of_receipt(client) == one
            server.stop()
            assert notes_in(tmp_path / "records") == [
                f"replacing the weights by {hashes[0]}",
                f"weights {hashes[0]} are served",
                "awake",
                "sleep level 2",
                f"weights {hashes[1]} are served",
                "awake",
            ]

    asyncio.run(run())
