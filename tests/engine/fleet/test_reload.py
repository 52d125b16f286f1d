"""Reload of the configuration while requests run: every part applies the new rules, or none does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from llm_serving.cli.main import main
from llm_serving.server.middleware.authentication import hash_key
from support.gated_server import AskedServer, GatedServer
from support.server_client import error_of

KEYS = {name: name * 20 for name in ("a", "root")}
ROWS = f"""
api_keys:
    a: {{key_sha256: {hash_key(KEYS["a"])}}}
    root: {{key_sha256: {hash_key(KEYS["root"])}, admin: True}}
"""
BODY = {"prompt": [5, 6, 7], "max_tokens": 40, "seed": 3, "ignore_eos": True}


def text_of(response: Any) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def test_reload_keeps_the_answers_of_running_requests(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        path = tmp_path / "my.yaml"
        path.write_text("model_config: {decode_batch_size: 4}\n")
        server = AskedServer(yaml=path)  # none of the requests ends before those behind them have been refused
        async with server.running() as client:
            server.runner.add_questions()
            alone = text_of(await client.post("/v1/completions", json=BODY))
            server.runner.add_questions(-1)
            all_have_come = Event()
            server.replica.ask(all_have_come.wait)
            asked = [asyncio.create_task(client.post("/v1/completions", json=BODY)) for _ in range(6)]
            try:
                await server.reach(lambda: server.engine.num_waiting == 6)
            finally:
                all_have_come.set()
            await server.reach(lambda: len(server.replica.scheduler.running) == 4)
            path.write_text(
                "model_config: {decode_batch_size: 1}\n"
                "scheduler_config: {max_waiting_queue: 1, policy: mixed, order: shortest}\n"
            )
            reloaded = (await client.post("/v1/reload")).json()
            assert "model_config.decode_batch_size: 4 -> 1" in reloaded["changed"] and reloaded["late"] == []
            assert server.replica.scheduler.limits.max_num_seqs == 1
            assert server.replica.ttft_predictor.limits.max_num_seqs == 1
            refused = await client.post("/v1/completions", json=BODY)
            assert refused.status_code == 429 and "of 1 requests" in refused.text
            server.runner.add_questions()
            assert [text_of(answer) for answer in await asyncio.gather(*asked)] == [alone] * 6
            server.replica.scheduler.check_integrity()
            metrics = (await client.get("/metrics")).text
            assert 'config_reloads_total{model_name="demo",outcome="applied"} 1.0' in metrics
            assert "bound_violations_total{" in metrics and server.metrics.num_bound_violations == 0
            assert (await client.post("/v1/reload")).json() == {"changed": [], "late": []}
        assert any("scheduler_config.policy: prefill_first -> mixed" in each.message for each in caplog.records)

    with caplog.at_level("INFO"):
        asyncio.run(run())


def test_refused_reload_changes_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        path = tmp_path / "my.yaml"
        path.write_text("scheduler_config: {max_waiting_queue: 9}")
        server = GatedServer(yaml=path)
        async with server.running() as client:
            before, rules = server.engine.config, server.replica.scheduler.waiting
            for text, message in (
                ("scheduler_config: {max_waiting_queue: 8}\npa_config: {block_size: 32}", "pa_config.block_size"),
                (
                    "scheduler_config: {max_waiting_queue: -8}",
                    "my.yaml:1: `scheduler_config.max_waiting_queue` must be",
                ),
            ):
                path.write_text(text)
                refused = await client.post("/v1/reload")
                assert refused.status_code == 400 and message in error_of(refused)["message"]
            assert server.engine.config is before
            assert server.replica.scheduler.waiting is rules

    asyncio.run(run())


def test_reload_changes_api_keys_and_their_rate_limits(tmp_path: Path) -> None:
    async def run() -> None:
        path = tmp_path / "my.yaml"
        path.write_text(ROWS)
        server = GatedServer(yaml=path)
        async with server.running() as client:
            user, root = ({"x-api-key": KEYS[name]} for name in ("a", "root"))
            assert (await client.post("/v1/reload", headers=user)).status_code == 403
            path.write_text(ROWS.replace("}\n    root", ", max_requests_per_minute: 2}\n    root"))
            assert (await client.post("/v1/reload", headers=root)).json()["changed"]
            codes = [(await client.get("/v1/models", headers=user)).status_code for _ in range(3)]
            assert codes == [200, 200, 429]
            path.write_text(ROWS.replace("}\n    root", ", max_requests_per_minute: 4}\n    root"))
            await client.post("/v1/reload", headers=root)
            codes = [(await client.get("/v1/models", headers=user)).status_code for _ in range(2)]
            assert codes == [429, 429]  # a larger limit fills up with time, what was used stays used
            path.write_text(ROWS.replace(hash_key(KEYS["a"]), hash_key("b" * 20)))
            await client.post("/v1/reload", headers=root)
            assert (await client.get("/v1/models", headers=user)).status_code == 401
            assert (await client.get("/v1/models", headers={"x-api-key": "b" * 20})).status_code == 200

    asyncio.run(run())


def test_replica_that_joins_after_a_reload_uses_the_new_rules(tmp_path: Path) -> None:
    async def run() -> None:
        path = tmp_path / "my.yaml"
        path.write_text("serving_config: {agent_ports: [1, 2]}\nscheduler_config: {quantum_steps: 8}")
        server = GatedServer(yaml=path)
        async with server.running() as client:
            await server.reach(lambda: not server.engine.health().loading)
            await client.post("/v1/replicas/1/drain")
            await server.reach(lambda: server.engine.replicas.state(1) == "left")
            path.write_text("serving_config: {agent_ports: [1, 2]}\nscheduler_config: {quantum_steps: 9}")
            await client.post("/v1/reload")
            await client.post("/v1/replicas/1/join")
            await server.reach(lambda: server.engine.replicas.state(1) == "serving")
            await server.reach(lambda: server.engine.replicas.engines[1].scheduler.limits.quantum_steps == 9)

    asyncio.run(run())


def test_reload_command_prints_changes_and_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from llm_serving.config import load_config
    from llm_serving.engine.lifecycle import ConfigReloader
    from support.fakes import FakeEngine
    from support.http_serving import serving

    path = tmp_path / "my.yaml"
    path.write_text("scheduler_config: {quantum_steps: 8}")
    engine = FakeEngine()
    engine.reloading = ConfigReloader(load_config(path), engine.reloading._replicas, engine.metrics)
    path.write_text("scheduler_config: {quantum_steps: 9}")
    with serving(engine) as url:
        assert main(["reload", "--url", url]) == 0
        assert capsys.readouterr().out == "scheduler_config.quantum_steps: 8 -> 9\n"
        assert main(["reload", "--url", url]) == 0
        assert capsys.readouterr().out == "nothing has changed\n"
        path.write_text("scheduler_config: {quantum_steps: x}")
        assert main(["reload", "--url", url]) == 1
        assert "my.yaml:1: `scheduler_config.quantum_steps` must be an integer" in capsys.readouterr().err
