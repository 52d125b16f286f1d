"""A chat model and an embedding model in one server, in real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from families import encoders
from support.server_process import ONE_THREAD, Server, start_server
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

pytestmark = pytest.mark.end_to_end

NUM_REQUESTS = 8
YAML = """
models:
    chat:
        path: demo
        aliases: [demo]
        model_config: {{max_generate_length: 1024, decode_batch_size: 4}}
        pa_config: {{num_blocks: 512}}
    embed:
        path: {encoder}
        dtype: float32
        model_config: {{decode_batch_size: 4}}
        pa_config: {{num_blocks: 64}}
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "encoder"
    folder.mkdir()
    encoders.write("bert", folder)
    tokenizer = Tokenizer(WordLevel({f"<{number}>": number for number in range(encoders.VOCAB)}, unk_token="<0>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    path = tmp_path / "several.yaml"
    path.write_text(YAML.format(encoder=folder))
    server = start_server("--config", str(path), "--set", ONE_THREAD)
    yield server
    server.stop()


async def complete(client: httpx.AsyncClient, number: int, model: str = "chat") -> str:
    """Return the text of a stream."""
    body = {
        "model": model,
        "prompt": f"Count from {number} to {number + 9}.",
        "max_tokens": 24 + number,
        "temperature": 1.0,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
    assert response.status_code == 200 and lines[-1] == "data: [DONE]", lines
    chunks: list[dict[str, Any]] = [httpx.Response(200, text=line[6:]).json() for line in lines[:-1]]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


async def embed(client: httpx.AsyncClient, number: int) -> list[float]:
    body = {"model": "embed", "input": [list(range(3, 6 + number))]}
    response = await client.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    vector: list[float] = response.json()["data"][0]["embedding"]
    return vector


async def answers(client: httpx.AsyncClient) -> list[Any]:
    texts = [complete(client, number) for number in range(NUM_REQUESTS)]
    return await asyncio.gather(*texts, *(embed(client, number) for number in range(NUM_REQUESTS)))


def test_two_models_answer_by_name_and_are_replaced_under_load(server: Server) -> None:
    async def run() -> None:
        async with asyncio.timeout(300), server.client() as client:
            cards = (await client.get("/v1/models")).json()["data"]
            assert [(card["id"], card["kind"], card["aliases"]) for card in cards] == [
                ("chat", "generate", ["demo"]),
                ("embed", "embed", []),
            ]
            unknown = await client.post("/v1/completions", json={"model": "other", "prompt": "a"})
            assert unknown.status_code == 404
            assert "must be one of the served models: chat, embed" in unknown.json()["error"]["message"]
            alone: list[Any] = [await complete(client, number) for number in range(NUM_REQUESTS)]
            alone += [await embed(client, number) for number in range(NUM_REQUESTS)]
            assert await complete(client, 3, "demo") == await complete(client, 3, "") == alone[3]
            before = {process.pid for process in server.work_agents()}
            loads = [asyncio.create_task(answers(client))]
            for name in ("chat", "embed"):
                loads.append(asyncio.create_task(answers(client)))
                replaced = await client.post(f"/v1/models/{name}/replace")
                assert replaced.status_code == 200, replaced.text
                loads.append(asyncio.create_task(answers(client)))
            for load in loads:
                assert await load == alone
            while before & {process.pid for process in server.work_agents()}:
                await asyncio.sleep(0.05)
            assert len(server.work_agents()) == 2
            metrics = (await client.get("/metrics")).text
            assert metrics.count("# TYPE vllm:generation_tokens_total counter") == 1
            for name in ("chat", "embed"):
                assert f'llm_serving:steps_total{{model_name="{name}"}}' in metrics
            assert "embed: WorkAgent 0 is ready" in server.log
            assert (await client.post("/v1/models/embed/unload")).status_code == 200
            gone = await client.post("/v1/embeddings", json={"model": "embed", "input": "<3>"})
            assert gone.status_code == 404 and "served models: chat" in gone.json()["error"]["message"]
            assert (await client.post("/v1/models/embed/load")).status_code == 200
            assert await embed(client, 2) == alone[NUM_REQUESTS + 2]
            health = (await client.get("/health")).json()
            assert (health["status"], health["detail"]) == ("ready", "chat: ready; embed: ready")

    asyncio.run(run())
