"""Routes that pause, put to sleep and change a model, over HTTP with fake WorkAgents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from llm_serving.config.sections.lora import LoraConfig
from llm_serving.config.tables import ApiKey
from llm_serving.engine.adapters import Adapter
from llm_serving.engine.lifecycle import Lifecycle
from llm_serving.server.middleware.authentication import hash_key
from support.gated_server import GatedServer
from support.http_serving import TIMEOUT_S, connect, post
from support.page_server import PageServer
from support.server_client import error_of

KEYS = {name: name * 20 for name in ("a", "root")}
API_KEYS = tuple(ApiKey(name=name, key_sha256=hash_key(key), admin=name == "root") for name, key in KEYS.items())
CHANGES = ("/v1/pause", "/v1/resume", "/v1/sleep", "/v1/wake_up", "/v1/update_weights")


def test_changes_require_an_administrator() -> None:
    async def run() -> None:
        async with GatedServer(api_keys=API_KEYS).running() as client:
            for path in CHANGES:
                refused = await client.post(path, headers={"x-api-key": KEYS["a"]})
                assert (refused.status_code, error_of(refused)["param"]) == (403, "api_key"), path

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/sleep?level=3", "`level` must be an integer from 1 to 2. Given: '3'"),
        ("/v1/sleep?level=2&running=freeze", "`running` must be finish or abort at level 2"),
        ("/v1/pause?running=later", "`running` must be one of finish, abort, freeze. Given: 'later'"),
        ("/v1/pause?new_requests=drop", "`new_requests` must be one of wait, refuse. Given: 'drop'"),
        ("/v1/resume?running=abort", "`running` is not a parameter of this route's URL"),
        ("/v1/update_weights?version=x", "`version` can be given only with `model_config.weights_folder`. Given: 'x'"),
    ],
)
def test_refusals_name_field_rule_and_value(path: str, message: str) -> None:
    async def run() -> None:
        async with GatedServer().running() as client:
            refused = await client.post(path)
            assert refused.status_code == 400
            assert error_of(refused)["message"].startswith(message)
            assert (await client.get("/v1/is_sleeping")).json() == {"is_sleeping": False, "level": 0, "state": ""}

    asyncio.run(run())


def test_a_version_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "versions").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "versions" / "link").symlink_to(tmp_path / "elsewhere")

    async def run() -> None:
        server = GatedServer()
        server.engine.config = replace(
            server.engine.config, model=replace(server.engine.config.model, weights_folder=tmp_path / "versions")
        )
        server.engine.lifecycle = Lifecycle(server.engine.config, server.engine._dispatcher, print)
        server.engine.lifecycle.weights = tmp_path
        async with server.running() as client:
            for version in ("link", "..", "../elsewhere", str(tmp_path / "elsewhere"), "gone", ""):
                refused = await client.post("/v1/update_weights", params={"version": version})
                assert refused.status_code == 400
                assert error_of(refused)["message"].startswith("`version` must be"), version
            (tmp_path / "versions" / "one.gguf").touch()
            refused = await client.post("/v1/update_weights?version=one.gguf")
            rule = "`version` must be a folder with safetensors: a GGUF file cannot replace weights. Given: 'one.gguf'"
            assert (refused.status_code, error_of(refused)["message"]) == (400, rule)
            server.engine.lifecycle.weights = tmp_path / "served.gguf"
            refused = await client.post("/v1/update_weights?version=link")
            assert "only if local WorkAgents read the weights from a folder, not from a GGUF file" in refused.text

    asyncio.run(run())


def test_a_request_that_waits_while_its_adapter_is_unloaded_is_refused() -> None:
    async def run() -> None:
        server = GatedServer(lora=LoraConfig(lora_folder=Path("adapters")))
        adapters = server.engine.adapters
        adapters.add(Adapter("one", Path("one"), "1" * 64))
        async with server.running() as client:
            await client.post("/v1/pause")
            held = asyncio.create_task(client.post("/v1/completions", json={"model": "one", "prompt": "a"}))
            gate = server.engine.lifecycle.gate
            assert gate is not None
            await server.reach(lambda: gate._num_waiting == 1)
            adapters.remove("one")
            await client.post("/v1/resume")
            refused = await held
            assert refused.status_code == 404
            assert error_of(refused)["message"].startswith("`model` must be a loaded adapter: this one was unloaded")

    asyncio.run(run())


def test_a_client_that_leaves_makes_room_for_another_one_to_wait() -> None:
    with PageServer(max_waiting_queue=1).serving() as server:
        httpx.post(f"{server.url}/v1/pause", timeout=TIMEOUT_S).raise_for_status()
        gate = server.engine.lifecycle.gate
        assert gate is not None
        for _ in range(2):
            with connect(server.url) as client:
                client.sendall(post("/v1/completions", b'{"prompt": "a"}'))
                wait_until(lambda: gate._num_waiting == 1)
            wait_until(lambda: gate._num_waiting == 0)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_requests_wait_within_their_deadline_or_are_refused() -> None:
    async def run() -> None:
        server = GatedServer()
        async with server.running() as client:
            await server.reach(lambda: not server.engine.health().loading)
            assert (await client.post("/v1/sleep")).json()["level"] == 1
            late = await client.post("/v1/completions", json={"prompt": "a", "timeout_s": 0.01})
            assert late.status_code == 504
            held = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}))
            keyed = {"idempotency-key": "one"}
            both = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}, headers=keyed))
            gate = server.engine.lifecycle.gate
            assert gate is not None
            await server.reach(lambda: gate._num_waiting == 2)
            assert not held.done() and not both.done()
            assert (await client.post("/v1/wake_up")).status_code == 200
            assert [(await each).status_code for each in (held, both)] == [200, 200]
            await client.post("/v1/pause?new_requests=refuse")
            refused = await client.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
            assert error_of(refused)["message"] == "the model is paused; new requests are refused"

    asyncio.run(run())
