"""GET /v1/scheduler: slots, blocks and queues, and what other tenants see of them."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from llm_serving.config.tables import ApiKey
from llm_serving.engine import control
from llm_serving.observability.event_log import client_id_of
from llm_serving.observability.snapshot import MAX_WAITING, BlockUsage, scheduler_state
from llm_serving.server.admin.live import ROWS
from llm_serving.server.admin.scheduler import MAX_ROWS, Replica, view_of
from llm_serving.server.middleware.authentication import hash_key
from llm_serving.server.openapi import openapi_document
from llm_serving.server.routes import ENDPOINTS
from support.factories import create_request, create_scheduler, run_step
from support.gated_server import NUM_BLOCKS, GatedServer

KEYS = {name: name * 20 for name in ("ann", "bob", "root")}
API_KEYS = tuple(ApiKey(name=name, key_sha256=hash_key(key), admin=name == "root") for name, key in KEYS.items())
LONG = {"prompt": list(range(5, 25)), "max_tokens": 400, "temperature": 0, "ignore_eos": True, "seed": 1}
LISTS = ("tenants", "running_requests", "waiting_requests")
LISTS_OF_ROWS = {name: ROWS[name] for name in ("classes", *LISTS)}
DOCS = Path(__file__).resolve().parents[3] / "docs"


async def ask(server, client, **headers):
    """Return the response between two steps: the engine is busy with one until its gate opens."""
    asking = asyncio.create_task(client.get("/v1/scheduler", headers=headers))
    await server.reach(lambda: bool(server.replica._inbox.messages))
    server.runner.gate.set()
    return await asking


async def load(server, client, names, *, with_keys):
    """Submit one long request for each caller; the first runs."""
    server.runner.gate.clear()
    tasks = []
    for number, name in enumerate(names):
        headers = {"x-api-key": KEYS[name]} if with_keys else {}
        body = LONG | {"user": name, "request_id": name}
        tasks.append(asyncio.create_task(client.post("/v1/completions", json=body, headers=headers)))
        await server.reach(lambda n=number: server.engine.num_running + server.engine.num_waiting == n + 1)
        if number == 0:
            await server.reach(lambda: server.engine.num_running == 1)
    return tasks


async def end(client, tasks, **headers):
    for name in ("ann", "bob"):
        await client.delete(f"/v1/requests/{name}", headers=headers)
    await asyncio.gather(*tasks)


def test_scheduler_view_shows_slots_blocks_and_queue():
    async def run():
        server = GatedServer(max_num_seqs=1)
        async with server.running() as client:
            tasks = await load(server, client, ["ann", "bob", "bob"], with_keys=False)
            answer = await ask(server, client)
            await end(client, tasks)
            return answer

    answer = asyncio.run(run())
    assert answer.status_code == 200
    [replica], silent = answer.json()["replicas"], answer.json()["silent"]
    assert silent == []
    assert (replica["replica"], replica["policy"], replica["slots"]) == (0, "prefill_first", 1)
    assert (replica["running"], replica["waiting"]) == (1, 2)
    [row] = replica["running_requests"]
    assert (client_id_of(row["id"]), row["tenant"]) == ("ann", "ann")
    assert (row["request_class"], row["phase"]) == ("standard", "decode")
    assert row["tokens"] > 20
    assert row["blocks"] == -(-row["computed"] // 16)
    assert (row["since_step"], row["preemptions"]) == (0, 0)
    assert 0 <= row["seconds"] < 60
    assert replica["step"] > 0
    waiting = [(client_id_of(row["id"]), row["has_run"]) for row in replica["waiting_requests"]]
    assert waiting == [("bob", False), ("bob", False)]
    blocks = replica["blocks"]
    assert (blocks["total"], blocks["used"], blocks["tokens"]) == (NUM_BLOCKS, row["blocks"], 16)
    assert blocks["used"] + blocks["free"] == blocks["total"]
    standard = next(each for each in replica["classes"] if each["request_class"] == "standard")
    assert (standard["running"], standard["waiting"], standard["blocks"]) == (1, 2, row["blocks"])
    assert standard["oldest_s"] >= replica["waiting_requests"][1]["seconds"]
    assert "preempted at most" in standard["bounds"]
    tenants = {each["tenant"]: (each["running"], each["waiting"]) for each in replica["tenants"]}
    assert tenants == {"ann": (1, 0), "bob": (0, 2)}
    served = next(each["served"] for each in replica["tenants"] if each["tenant"] == "ann")
    assert served["standard"] >= 20


@pytest.mark.parametrize(
    ("asker", "seen"), [("ann", {"ann"}), ("bob", {"bob"}), ("root", {"ann", "bob"})], ids=["ann", "bob", "root"]
)
def test_scheduler_view_of_a_tenant_has_totals_of_all(asker, seen):
    async def run():
        server = GatedServer(max_num_seqs=1, api_keys=API_KEYS)
        async with server.running() as client:
            tasks = await load(server, client, ["ann", "bob"], with_keys=True)
            answer = await ask(server, client, **{"x-api-key": KEYS[asker]})
            await end(client, tasks, **{"x-api-key": KEYS["root"]})
            return answer

    answer = asyncio.run(run())
    [replica] = answer.json()["replicas"]
    assert (replica["running"], replica["waiting"]) == (1, 1)
    assert {each["tenant"] for name in LISTS for each in replica[name]} == seen
    others = {"ann", "bob"} - seen
    assert not any(name in answer.text for name in others), "it names another tenant"


def test_scheduler_view_names_silent_replicas(monkeypatch):
    monkeypatch.setattr(control, "STATE_TIMEOUT_S", 0.01)

    async def run():
        server = GatedServer()
        async with server.running() as client:
            tasks = await load(server, client, ["ann"], with_keys=False)
            first, second = [(await client.get("/v1/scheduler")).json() for _ in range(2)]
            assert first == second == {"replicas": [], "silent": [0]}
            assert len(server.replica._inbox.messages) == 1, "each question waits for itself"
            server.runner.gate.set()
            await end(client, tasks)

    asyncio.run(run())


def test_scheduler_view_is_bounded():
    scheduler = create_scheduler(max_num_seqs=2)
    for number in range(MAX_WAITING + 50):
        scheduler.add(create_request(tenant=f"tenant {number}", arrival_time=float(number)))
    run_step(scheduler)
    state = scheduler_state(scheduler, 1e6)
    assert (len(state.waiting), state.num_waiting) == (MAX_WAITING, MAX_WAITING + 48)
    [replica] = view_of({0: state}, [], "mixed", None).replicas
    assert len(replica.waiting_requests) == len(replica.tenants) == MAX_ROWS
    assert replica.waiting == MAX_WAITING + 48


def test_slot_time_starts_at_the_latest_admission():
    scheduler = create_scheduler(num_blocks=4, max_num_seqs=2, max_model_len=16)
    low, high = create_request(4, priority=1, max_tokens=9), create_request(8, priority=-1, max_tokens=1)
    scheduler.add(low)
    run_step(scheduler, now=10.0)
    [row] = scheduler_state(scheduler, 10.0).running.values()
    assert (row.since_step, row.seconds) == (0, 0.0)
    for step in range(1, 4):
        run_step(scheduler, now=10.0 + step)
    scheduler.add(high)
    while low.num_preemptions == 0 or low not in scheduler.running:
        run_step(scheduler, now=50.0)
    row = scheduler_state(scheduler, 60.0).running[low.sequence]
    assert row.seconds == 10.0
    assert row.since_step > 3
    assert row.preemptions == 1


def test_scheduler_view_numbers_shared_prefixes_without_block_ids():
    scheduler = create_scheduler(num_blocks=16, prefix_caching=True)
    for number in range(4):
        scheduler.add(create_request(12, tenant="ab"[number % 2]))
        run_step(scheduler)  # each finds what the first has computed, in blocks of its tenant
    state = scheduler_state(scheduler, 1.0)
    assert len({each.group for each in state.running.values()}) == 2
    [replica] = view_of({0: state}, [], "mixed", None).replicas
    assert [(each.tenant, each.group, each.shared > 0) for each in replica.running_requests] == [
        ("a", 0, True),
        ("b", 1, True),
        ("a", 0, True),
        ("b", 1, True),
    ]
    [replica] = view_of({0: state}, [], "mixed", "b").replicas
    assert [each.group for each in replica.running_requests] == [0, 0]


def test_scheduler_view_matches_its_documentation():
    text = (DOCS / "guides" / "control.md").read_text(encoding="utf-8")
    example = "{" + text.partition("v1/scheduler\n{")[2].partition("```")[0]
    shown = json.loads(re.sub(r",\s*\.\.\.", "", example))
    rows = [(Replica, shown["replicas"])]
    rows += [(kind, shown["replicas"][0][name]) for name, kind in LISTS_OF_ROWS.items()]
    for kind, given in rows:
        for row in given:
            assert set(row) <= set(kind.__struct_fields__)
    assert set(shown["replicas"][0]["blocks"]) == set(BlockUsage.__struct_fields__)


def test_scheduler_route_is_documented():
    document = openapi_document(ENDPOINTS, with_keys=False)
    operation = document["paths"]["/v1/scheduler"]["get"]
    assert operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"].endswith("/SchedulerView")
    assert "running_requests" in json.dumps(document["components"]["schemas"]["Replica"])
