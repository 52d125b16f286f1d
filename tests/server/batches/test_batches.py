"""Batches: each stored line is answered once, also if the server ends in between."""

from __future__ import annotations

import asyncio

from llm_serving.config.tables import ApiKey
from llm_serving.errors import UnavailableError
from llm_serving.server.batches import runner as module
from llm_serving.server.batches.runner import Answered
from llm_serving.server.batches.store import BatchStore
from llm_serving.server.middleware.authentication import hash_key
from support.batch_site import Site, jsonl, line, run
from support.fakes import FakeEngine, Script
from support.server_client import error_of, request


def test_batch_answers_lines_in_order_in_the_lowest_class(tmp_path):
    engine = FakeEngine()

    async def talking():
        async with Site(engine, tmp_path) as site:
            lines = jsonl(line("a"), line("b", temperature=-1), line("c", priority=0))
            batch = await site.ended(await site.begin(lines, metadata={"of": "mine"}))
            return batch, await site.lines(batch["output_file_id"]), await site.lines(batch["error_file_id"])

    batch, answers, errors = run(talking)
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert batch["metadata"] == {"of": "mine"}
    assert [(each["custom_id"], each["response"]["status_code"]) for each in answers] == [("a", 200), ("c", 200)]
    assert answers[0]["response"]["body"]["choices"][0]["text"] == "Hello world"
    assert [(each["custom_id"], each["response"]["status_code"]) for each in errors] == [("b", 400)]
    assert "temperature" in errors[0]["response"]["body"]["error"]["message"]
    assert sorted(each.priority for each in engine.submitted) == [0, 1]


def test_batch_survives_a_restart_without_loss_or_repetition(tmp_path):
    first, second = FakeEngine(Script(hold_after=0)), FakeEngine()
    first.script_for = lambda submitted: Script() if len(first.submitted) < 3 else Script(hold_after=0)

    async def talking():
        async with Site(first, tmp_path) as site:
            batch_id = await site.begin(jsonl(*map(line, "abcde")))
            await first.held.wait()
            await site.answered(batch_id, 2)
        async with Site(second, tmp_path) as site:
            batch = await site.ended(batch_id)
            return batch, await site.lines(batch["output_file_id"])

    batch, answers = run(talking)
    assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
    assert [each["custom_id"] for each in answers] == list("abcde")
    assert len(second.submitted) == 3


def test_cancelled_batch_keeps_its_answers(tmp_path, caplog):
    engine = FakeEngine()
    engine.script_for = lambda submitted: Script() if len(engine.submitted) < 2 else Script(hold_after=0)

    async def talking():
        async with Site(engine, tmp_path) as site:
            batch_id = await site.begin(jsonl(*map(line, "abc")))
            await engine.held.wait()
            await site.answered(batch_id, 1)
            cancelling = (await site.client.post(f"/v1/batches/{batch_id}/cancel")).json()
            batch = await site.ended(batch_id)
            again = (await site.client.post(f"/v1/batches/{batch_id}/cancel")).json()
            files = [await site.lines(batch[name]) for name in ("output_file_id", "error_file_id")]
            return cancelling, batch, again, files

    cancelling, batch, again, (answers, errors) = run(talking)
    assert (cancelling["status"], batch["status"], again["status"]) == ("cancelling", "cancelled", "cancelled")
    assert [each["custom_id"] for each in answers] == ["a"]
    assert [each["error"]["code"] for each in errors] == ["batch_cancelled"] * 2
    assert len(engine.aborted) == 2
    assert "status 500" not in caplog.text


def test_batch_that_completes_during_cancellation_stays_completed(tmp_path):
    engine = FakeEngine(Script(hold_after=0))

    async def talking():
        async with Site(engine, tmp_path) as site:
            batch_id = await site.begin(jsonl(line("a")))
            await engine.held.wait()
            batch, stored = await site.batches.stored(BatchStore.batch, batch_id, None), site.batches.stored

            async def once_it_has_ended(*arguments):
                if asyncio.current_task() is cancelling:
                    await asyncio.wait([site.batches.task(batch_id)])
                return await stored(*arguments)

            site.batches.stored = once_it_has_ended
            cancelling = asyncio.create_task(site.batches.cancel(batch.id))
            await asyncio.sleep(0)
            engine.gate.set()
            cancelled = await cancelling
            return cancelled.status, (await site.show(batch_id))["status"]

    assert run(talking) == ("completed", "completed")


def test_stopped_batch_can_be_cancelled(tmp_path):
    async def fail(*_):
        raise ValueError("a fault of ours")

    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            site.batches.ask = fail
            batch_id = await site.begin(jsonl(line("a")))
            still = await site.ended(batch_id)
            cancelling = (await site.client.post(f"/v1/batches/{batch_id}/cancel")).json()
            return still["status"], cancelling["status"], (await site.ended(batch_id))["status"]

    assert run(talking) == ("in_progress", "cancelling", "cancelled")


def test_batch_waiting_for_the_store_is_cancelled_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEAST_STORE_PAUSE_S", 3600.0)

    async def fail(*_):
        raise UnavailableError("the disk is full")

    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            site.batches.ask = fail
            batch_id = await site.begin(jsonl(line("a")))
            while site.batches.trouble is None:
                await asyncio.sleep(0)
            await site.client.post(f"/v1/batches/{batch_id}/cancel")
            return (await asyncio.wait_for(site.ended(batch_id), 60.0))["status"]

    assert run(talking) == "cancelled"


async def all_ended(site, batch_ids):
    """Return the final states of the batches."""
    shown = [await site.show(each) for each in batch_ids]
    while any(each["status"] in ("validating", "in_progress", "cancelling") for each in shown):
        await asyncio.sleep(0)
        shown = [await site.show(each) for each in batch_ids]
    return [each["status"] for each in shown]


def test_oldest_batches_of_a_tenant_run_and_others_use_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_AT_ONCE", 2)
    keys = tuple(ApiKey(name=name, key_sha256=hash_key(name)) for name in ("me", "you"))
    first = FakeEngine(Script(hold_after=0), api_keys=keys)

    async def talking():
        async with Site(first, tmp_path, {"x-api-key": "me"}) as site:
            mine = [await site.begin(jsonl(line(name))) for name in "abcde"]
            assert site.batches._tasks.keys() == set(mine[:2])
            assert (await site.client.post(f"/v1/batches/{mine[3]}/cancel")).json()["status"] == "cancelling"
            assert await all_ended(site, mine[3:4]) == ["cancelled"]
            assert site.batches._tasks.keys() == set(mine[:2])
            site.client.headers["x-api-key"] = "you"
            yours = await site.begin(jsonl(line("f")))
            assert site.batches._tasks.keys() == {*mine[:2], yours}
        second = FakeEngine(api_keys=keys)
        async with Site(second, tmp_path, {"x-api-key": "me"}) as site:
            assert len(site.batches._tasks) == 3
            return second, await all_ended(site, mine)

    engine, statuses = run(talking)
    assert statuses == ["completed"] * 3 + ["cancelled", "completed"]
    assert [each.tenant for each in engine.submitted].count("me") == 4


def test_stopped_batch_frees_its_slot_for_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_AT_ONCE", 1)
    asked = []

    async def fail_once(*_):
        asked.append(1)
        if len(asked) == 1:
            raise ValueError("a fault of ours")
        return Answered(200, b"{}")

    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            site.batches.ask = fail_once
            still, next_one = [await site.begin(jsonl(line(name))) for name in "ab"]
            assert await all_ended(site, [next_one]) == ["completed"]
            assert (await site.show(still))["status"] == "in_progress"
            await site.client.post(f"/v1/batches/{still}/cancel")
            return await all_ended(site, [still])

    assert run(talking) == ["cancelled"]


def test_unfinished_batch_expires(tmp_path, monkeypatch):
    monkeypatch.setattr("llm_serving.server.batches.api.WINDOW_S", 0)
    engine = FakeEngine(Script(hold_after=0))

    async def talking():
        async with Site(engine, tmp_path) as site:
            batch = await site.ended(await site.begin(jsonl(line("a"))))
            return batch, await site.lines(batch["error_file_id"])

    batch, errors = run(talking)
    assert batch["status"] == "expired"
    assert errors[0]["error"]["code"] == "batch_expired"


def _fill(store, num_pages=0):
    """Limit the database to `num_pages` more pages than it uses; a negative number removes the limit."""
    used = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {used + num_pages if num_pages >= 0 else 2**30}")


def test_batch_continues_when_a_full_disk_has_room(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEAST_STORE_PAUSE_S", 0.0)
    answered_when_full = []

    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            room, ask = asyncio.Event(), site.batches.ask

            async def ask_later(*arguments):
                await room.wait()
                return await ask(*arguments)

            site.batches.ask = ask_later
            batch_id = await site.begin(jsonl(*(line(str(n)) for n in range(40))))  # whose answers need new pages
            while (await site.show(batch_id))["status"] != "in_progress":
                await asyncio.sleep(0)
            await site.batches.stored(_fill)
            form = {"files": {"file": ("in.jsonl", b"x" * 9000)}, "data": {"purpose": "batch"}}
            refused = await site.client.post("/v1/files", **form)
            room.set()
            while site.batches.trouble is None:
                await asyncio.sleep(0)
            answered_when_full.append((await site.show(batch_id))["request_counts"]["completed"])
            await site.batches.stored(_fill, -1)
            batch = await site.ended(batch_id)
            return refused, batch, await site.lines(batch["output_file_id"])

    refused, batch, answers = run(talking)
    assert refused.status_code == 503
    assert error_of(refused)["message"] == "files and batches cannot be stored now: database or disk is full"
    assert answered_when_full[0] < 40
    assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert [each["custom_id"] for each in answers] == [str(n) for n in range(40)]


def test_batch_metadata_is_limited(tmp_path):
    async def talking():
        async with Site(FakeEngine(), tmp_path) as site:
            fields = {"endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"x": "y" * 513}}
            body = {"input_file_id": await site.upload(jsonl(line("a"))), **fields}
            return await site.client.post("/v1/batches", json=body)

    assert error_of(run(talking))["param"] == "metadata"


def test_batches_require_batch_path():
    answer = request(FakeEngine(), "GET", "/v1/batches")
    assert answer.status_code == 404
    assert "serving_config.batch_path" in error_of(answer)["message"]
