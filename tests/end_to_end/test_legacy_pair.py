"""The older servers' pair of YAML files, with a small Llama in MindFormers' form, on the real processes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from llm_serving_tools.commands.convert import convert
from support.server_process import ROOT, Server, start_server

pytestmark = pytest.mark.end_to_end

PAIR = ROOT / "configs" / "llama"
DEMO = ROOT / "llm-serving" / "llm_serving" / "demo_model"
QUESTIONS = {
    "Add 17 and 25.": "42",
    "What is the capital of France?": "Paris",
    "Sort these words alphabetically: sail rocket beach.": "beach rocket sail",
}


def sized(text: str, sizes: dict[str, Any]) -> str:
    """Return the YAML with other values, each for a key that occurs once."""
    for key, value in sizes.items():
        text, count = re.subn(rf"^( +{key}: ).*$", rf"\g<1>{value}", text, flags=re.MULTILINE)
        assert count == 1, key
    return text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the project's pair of files, with other sizes, model folder and device."""
    folder = tmp_path_factory.mktemp("older")
    convert(DEMO, folder / "checkpoint", "mindformers", files="ckpt", yaml=None)
    facts = json.loads((DEMO / "config.json").read_text())
    shape = {
        "seq_length": facts["max_position_embeddings"],
        "hidden_size": facts["hidden_size"],
        "num_layers": facts["num_hidden_layers"],
        "num_heads": f"{facts['num_attention_heads']}\n    n_kv_heads: {facts['num_key_value_heads']}",
        "vocab_size": facts["vocab_size"],
        "multiple_of": f"256\n    intermediate_size: {facts['intermediate_size']}",
        "checkpoint_name_or_path": "'checkpoint'",
        "device_target": "'CPU'",
    }
    model_yaml = (PAIR / "predict_llama2_7b.yaml").read_text()
    (folder / "predict_llama2_7b.yaml").write_text(sized(model_yaml, shape))
    lengths = dict.fromkeys(("max_generate_length", "decode_seq_length"), facts["max_position_embeddings"])
    sizes = {**lengths, "vocab_size": facts["vocab_size"], "model_cfg_path": "'predict_llama2_7b.yaml'"}
    serving_yaml = (PAIR / "llama_7b_kbk_pa_dyn.yaml").read_text()
    (folder / "llama_7b_kbk_pa_dyn.yaml").write_text(sized(serving_yaml, sizes))
    # The configuration of Ascend: the graph of primitives in the pair's float16.
    settings = ("--config", str(folder / "llama_7b_kbk_pa_dyn.yaml"), "--set", "device_config.kernels=primitives")
    started = start_server(*settings)
    yield started
    started.stop()


async def generate(client: httpx.AsyncClient, prompt: str, **parameters: Any) -> dict[str, Any]:
    body = {"inputs": prompt, "parameters": {"do_sample": "False", "max_new_tokens": 32, **parameters}}
    response = await client.post("/models/llama2/generate", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def test_legacy_pair_answers_legacy_clients_alone_and_concurrently(server: Server) -> None:
    async def run() -> None:
        async with server.client() as client:
            reference = {prompt: await generate(client, prompt) for prompt in QUESTIONS}
            for prompt, right in QUESTIONS.items():
                assert reference[prompt]["generated_text"].strip() == right
                assert reference[prompt]["finish_reason"] == "eos"
            prompts = [prompt for prompt in QUESTIONS for _ in range(8)]
            together = await asyncio.gather(*(generate(client, prompt) for prompt in prompts))
        assert [each["tokens"] for each in together] == [reference[prompt]["tokens"] for prompt in prompts]

    asyncio.run(run())


def test_legacy_pair_streams_end_with_the_whole_text(server: Server) -> None:
    parameters = {"do_sample": "False", "return_full_text": "True", "max_new_tokens": 32}
    body = {"inputs": "Add 17 and 25.", "parameters": parameters, "stream": True}
    for route in ("llama2/generate_stream", "llama_7b/generate_stream", "llama_7b"):
        text = httpx.post(f"{server.url}/models/{route}", json=body, timeout=60.0).text
        pieces = [json.loads(line)["data"][0]["generated_text"] for line in text.splitlines() if line]
        assert ("".join(pieces[:-1]).strip(), pieces[-1].strip()) == ("42", "42"), route


def test_legacy_pair_serves_model_info_and_batch_size(server: Server) -> None:
    info = httpx.get(f"{server.url}/serving/get_serverd_model_info").text
    assert "llama_7b" in info
    assert httpx.get(f"{server.url}/serving/get_bs").text.startswith('data: {"event": "message"')
    assert "device_config.exactness: exact: the same request gets the same bytes" in server.log
