"""Adapters through a real server: each answer under load equals the answer alone, byte for byte."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from llm_serving.config.paths import DEMO_FOLDER
from llm_serving.models.spec import ModelSpec
from support.adapter_factories import write_adapter
from support.server_process import ONE_THREAD, metric, start_server

pytestmark = pytest.mark.end_to_end

SMALL_CACHE = (
    *("pa_config.num_blocks=40", "pa_config.num_swap_blocks=40", "scheduler_config.preemption_mode=swap"),
    *("model_config.decode_batch_size=16", "scheduler_config.max_prefill_tokens=32"),
    "scheduler_config.speculative_method=ngram",
)
"""Settings with which prompts are cut, requests are preempted and drafts are verified."""
NAMES = ("demo", "one", "two", "three")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    spec = ModelSpec.from_folder(DEMO_FOLDER)
    for seed, name in enumerate(NAMES[1:]):
        write_adapter(root / name, spec, rank=(4, 16, 8)[seed], seed=seed, strength=2)
    return root


def requests() -> list[dict[str, Any]]:
    rng = random.Random(0)
    words = "one little kite counts the numbers of a question that many people ask again".split()
    common = " ".join(rng.choices(words, k=40))
    return [
        {
            "model": NAMES[number % len(NAMES)],
            "prompt": f"{common} {' '.join(rng.choices(words, k=number % 5))}",
            "max_tokens": 16,
            "temperature": number % 3 / 2,
            "seed": number,
            "logprobs": 1,
            "ignore_eos": True,
        }
        for number in range(20)
    ]


async def answer(client: httpx.AsyncClient, request: dict[str, Any]) -> str:
    response = await client.post("/v1/completions", json=request)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == request["model"]
    return json.dumps(response.json()["choices"])


@pytest.mark.parametrize("settings", [SMALL_CACHE, ("cluster_config.tensor_parallel=2",)], ids=["small", "ranks"])
def test_answers_of_adapters_under_load_are_those_of_each_request_alone(
    folder: Path, settings: tuple[str, ...]
) -> None:
    modules = {name: str(folder / name) for name in NAMES[1:3]}
    own = (f"lora_config.lora_modules={json.dumps(modules)}", f"lora_config.lora_folder={folder}")
    given = (*own, "lora_config.max_loras=2", ONE_THREAD, *settings)
    server = start_server(*(part for each in given for part in ("--set", each)))
    try:

        async def run() -> None:
            async with asyncio.timeout(300), server.client() as client:
                loaded = await client.post("/v1/load_lora_adapter", json={"lora_name": "three", "lora_path": "three"})
                assert loaded.json() == {"name": "three", "num_unfinished": 0}
                models = (await client.get("/v1/models")).json()["data"]
                assert [(each["id"], each["parent"]) for each in models] == [("demo", None)] + [
                    (name, "demo") for name in NAMES[1:]
                ]
                alone = [await answer(client, each) for each in requests()]
                assert len(set(alone)) == len(alone)
                assert await asyncio.gather(*(answer(client, each) for each in requests())) == alone
                tasks = [asyncio.create_task(answer(client, each)) for each in requests()]
                await tasks[0]
                server.work_agents()[0].kill()
                assert await asyncio.gather(*tasks) == alone
                by_tgi = {"inputs": requests()[1]["prompt"], "parameters": {"adapter_id": "one", "max_new_tokens": 8}}
                by_model = {"model": "one", "prompt": by_tgi["inputs"], "max_tokens": 8, "temperature": 0}
                text = (await client.post("/v1/completions", json=by_model)).json()["choices"][0]["text"]
                assert (await client.post("/generate", json=by_tgi)).json()["generated_text"] == text

        asyncio.run(run())
    finally:
        server.stop()


async def num_accepted(client: httpx.AsyncClient) -> float:
    return await metric(client, "vllm:num_requests_running") + await metric(client, "vllm:num_requests_waiting{")


async def state_of_replica(client: httpx.AsyncClient, replica: int, state: str) -> None:
    while (await client.get("/v1/replicas")).json()["replicas"][replica]["state"] != state:
        await asyncio.sleep(0.01)


def test_requests_of_adapters_continue_on_decode_replicas_while_others_are_drained_and_join(folder: Path) -> None:
    modules = {name: str(folder / name) for name in NAMES[1:3]}
    own = (f"lora_config.lora_modules={json.dumps(modules)}", f"lora_config.lora_folder={folder}")
    settings = (*own, "cluster_config.roles=[prefill, decode, decode]", ONE_THREAD)
    settings = (*settings, "scheduler_config.max_prefill_tokens=32", "model_config.decode_batch_size=16")
    server = start_server(*(part for each in settings for part in ("--set", each)), num_agents=3)
    try:

        async def run() -> None:
            async with asyncio.timeout(300), server.client() as client:
                asked = [each | {"max_tokens": 40} for each in requests() if each["model"] != "three"][:9]
                alone = [await answer(client, each) for each in asked]
                tasks = [asyncio.create_task(answer(client, each)) for each in asked]
                assert (await client.post("/v1/replicas/2/drain")).status_code == 200
                assert await asyncio.gather(*tasks) == alone

                await state_of_replica(client, 2, "left")
                await client.post("/v1/load_lora_adapter", json={"lora_name": "three", "lora_path": "three"})
                same = {"model": "three", "max_tokens": 9, "temperature": 1.0, "ignore_eos": True}
                prompts = [[3 + (7 * at + number) % 900 for at in range(1000)] for number in range(2)]
                late = [same | {"prompt": prompt, "seed": 1} for prompt in prompts]
                alone = [await answer(client, each) for each in late]
                given = [each | {"request_id": f"late-{number}", "cache_salt": "x"} for number, each in enumerate(late)]
                tasks = [asyncio.create_task(answer(client, each)) for each in given]
                while await num_accepted(client) < len(late):
                    assert not any(task.done() for task in tasks)
                await client.post("/v1/pause?running=freeze")
                unloaded = await client.post("/v1/unload_lora_adapter", json={"lora_name": "three"})
                assert unloaded.json() == {"name": "three", "num_unfinished": len(late)}
                await client.post("/v1/replicas/2/join")
                await state_of_replica(client, 2, "serving")
                await client.post("/v1/replicas/1/drain")
                await client.post("/v1/resume")
                assert await asyncio.gather(*tasks) == alone
                explained = (await client.get("/v1/requests/late-1/explain")).json()
                assert explained["requests"][-1]["replica"] == 2, "it joined when the adapter was not offered any more"

        asyncio.run(run())
    finally:
        server.stop()


def test_refusals_say_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "one", tmp_path / "inside" / "one")
    server = start_server("--set", f"lora_config.lora_folder={tmp_path / 'inside'}", "--set", ONE_THREAD)
    try:

        async def run() -> None:
            async with asyncio.timeout(120), server.client() as client:

                async def refused(path: str, body: dict[str, Any]) -> tuple[int, str]:
                    response = await client.post(path, json=body)
                    content = response.json()["error"]
                    return response.status_code, content if isinstance(content, str) else content["message"]

                for path in ("../two", "/etc", "nowhere", ".", "\0"):
                    status, text = await refused("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": path})
                    assert (status, text) == (400, "`lora_path` must be a folder inside lora_config.lora_folder")
                status, text = await refused("/v1/completions", {"model": "new", "prompt": "a"})
                assert status == 404
                assert "`model` must be demo" in text
                status, text = await refused("/generate", {"inputs": "a", "parameters": {"adapter_id": "new"}})
                assert status == 404
                assert "`adapter_id` must be the name of a loaded adapter" in text
                status, text = await refused("/v1/unload_lora_adapter", {"lora_name": "new"})
                assert (status, text) == (404, "`lora_name` must be the name of a loaded adapter. Given: 'new'")

                await client.post("/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": "one"})
                write_adapter(tmp_path / "inside" / "one", ModelSpec.from_folder(DEMO_FOLDER), seed=9)
                server.work_agents()[0].kill()
                body = {"model": "new", "prompt": "a", "max_tokens": 1}
                status, text = await refused("/v1/completions", body)
                assert (status, "has changed since the adapter was loaded" in text) == (500, True)
                while (await client.post("/v1/completions", json=body)).status_code != 404:
                    await asyncio.sleep(0.01)
                assert (await client.post("/v1/completions", json=body | {"model": "demo"})).status_code == 200

        asyncio.run(run())
    finally:
        server.stop()
