"""GET /v1/live through the whole master: the stream, its visibility, and its end."""

from __future__ import annotations

import asyncio
import json
from threading import Event
from typing import Any

import pytest
from llm_serving.config.tables import ApiKey
from llm_serving.observability.event_log import client_id_of
from llm_serving.server.admin import live
from llm_serving.server.admin.live import ROWS
from llm_serving.server.app import create_app
from llm_serving.server.middleware.authentication import hash_key
from support.fakes import FakeEngine
from support.gated_server import NUM_BLOCKS, AskedServer, GatedServer
from support.server_client import RawClient, request

KEYS = {name: name * 20 for name in ("ann", "bob", "root")}
API_KEYS = tuple(ApiKey(name=name, key_sha256=hash_key(key), admin=name == "root") for name, key in KEYS.items())
LONG = {"prompt": list(range(5, 25)), "max_tokens": 400, "temperature": 0, "ignore_eos": True, "seed": 1}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine counts as silent because its thread waits for a core."""
    monkeypatch.setattr(live, "TIMEOUT_S", 60.0)


class Watcher(RawClient):
    """Reads events as they arrive, and disconnects."""

    def __init__(self, app: Any, key: str = "", method: str = "GET") -> None:
        super().__init__(FakeEngine(), "/v1/live", {})
        self._app = app
        self._scope |= {"method": method, "headers": [(b"x-api-key", key.encode())] if key else []}
        self._next = 1
        self.task = asyncio.create_task(self.run())

    async def events(self, count: int) -> list[tuple[str, Any]]:
        """Return the first events."""
        async with asyncio.timeout(30):
            while len(self._read()) < count and not self.task.done():
                await asyncio.sleep(0.001)  # a loop that never rests starves the thread of the engine
        return self._read()[:count]

    async def picture(self, holds: Any) -> dict[str, Any]:
        """Return the next snapshot that meets a condition, with rows by names."""
        while True:
            found = await self.events(self._next + 1)
            assert len(found) == self._next + 1, self.messages
            self._next += 1
            seen = by_name(found[0][1], found[-1][1])
            if holds(seen):
                return seen

    def _read(self) -> list[tuple[str, Any]]:
        text = b"".join(each.get("body", b"") for each in self.messages).decode()
        pairs = [block.split("\n") for block in text.split("\n\n")[:-1]]
        return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


def by_name(columns: dict[str, list[str]], picture: dict[str, Any]) -> dict[str, Any]:
    for replica in picture["replicas"]:
        for name, fields in columns.items():
            replica[name] = [dict(zip(fields, row, strict=True)) for row in replica[name]]
    return picture


def test_live_stream_starts_with_the_columns():
    async def run():
        async with GatedServer().running() as client:
            watcher = Watcher(client._transport.app)
            (first, columns), (second, picture) = await watcher.events(2)
            watcher.leave()
            await watcher.task
            return watcher.messages, first, columns, second, picture

    messages, first, columns, second, picture = asyncio.run(run())
    headers = dict(messages[0]["headers"])
    assert (messages[0]["status"], headers[b"content-type"]) == (200, b"text/event-stream; charset=utf-8")
    assert headers[b"cache-control"] == b"no-cache"
    assert (first, second) == ("columns", "picture")
    assert columns == {name: list(kind.__struct_fields__) for name, kind in ROWS.items()}
    assert picture["number"] == 1
    [replica] = picture["replicas"]
    assert (replica["running"], replica["waiting"], replica["blocks"]["total"]) == (0, 0, NUM_BLOCKS)
    assert replica["budget"] > 0


def test_live_stream_shows_waiting_preemption_and_end():
    def phases(picture: dict[str, Any]) -> dict[str, str]:
        [replica] = picture["replicas"]
        rows = {client_id_of(row["id"]): row["phase"] for row in replica["running_requests"]}
        for row in replica["waiting_requests"]:
            rows[client_id_of(row["id"])] = "preempted" if row["has_run"] else "queue"
        return rows | {client_id_of(row["id"]): row["reason"] for row in replica["ended"]}

    async def run():
        async with AskedServer(max_num_seqs=1).running() as client:
            app = client._transport.app
            low = asyncio.create_task(
                client.post("/v1/completions", json=LONG | {"request_id": "low", "priority_class": "batch"})
            )
            watcher = Watcher(app)
            seen = await watcher.picture(lambda picture: phases(picture).get("low") == "decode")
            [row] = seen["replicas"][0]["running_requests"]
            assert (row["prompt"], row["most"], row["request_class"]) == (20, 420, "batch")
            high = asyncio.create_task(
                client.post("/v1/completions", json=LONG | {"request_id": "high", "priority_class": "interactive"})
            )
            await watcher.picture(lambda picture: phases(picture) == {"high": "decode", "low": "preempted"})
            await client.delete("/v1/requests/high")
            await watcher.picture(lambda picture: phases(picture).get("high") == "abort")
            await watcher.picture(lambda picture: phases(picture) == {"low": "decode"})
            await client.delete("/v1/requests/low")
            seen = await watcher.picture(lambda picture: phases(picture).get("low") == "abort")
            [ended] = [row for row in seen["replicas"][0]["ended"] if client_id_of(row["id"]) == "low"]
            assert ended["preemptions"] == 1
            assert 0 < ended["first_token"] < ended["seconds"]
            watcher.leave()
            await asyncio.gather(low, high, watcher.task)

    asyncio.run(run())


@pytest.mark.parametrize(("asker", "seen"), [("ann", {"ann"}), ("bob", {"bob"}), ("root", {"ann", "bob"})])
def test_live_stream_has_only_totals_of_other_tenants(asker, seen):
    async def run():
        server = AskedServer(max_num_seqs=2, api_keys=API_KEYS)
        async with server.running() as client:
            app = client._transport.app
            tasks, all_have_come = [], Event()
            server.replica.ask(all_have_come.wait)  # so that no step has one of them alone
            for name in ("ann", "bob", "ann"):
                body, headers = LONG | {"request_id": name}, {"x-api-key": KEYS[name]}
                tasks.append(asyncio.create_task(client.post("/v1/completions", json=body, headers=headers)))
            await server.reach(lambda: server.engine.num_waiting == 3)
            all_have_come.set()
            await server.reach(lambda: server.engine.num_running == 2 and server.engine.num_waiting == 1)
            watcher = Watcher(app, KEYS[asker])
            picture = await watcher.picture(lambda each: bool(each["replicas"][0]["steps"]))
            text = b"".join(each.get("body", b"") for each in watcher.messages).decode()
            watcher.leave()
            await watcher.task
            server.runner.add_questions()
            for name in ("ann", "bob"):
                await client.delete(f"/v1/requests/{name}", headers={"x-api-key": KEYS["root"]})
            await asyncio.gather(*tasks)
            return picture, text

    picture, text = asyncio.run(run())
    [replica] = picture["replicas"]
    assert (replica["running"], replica["waiting"]) == (2, 1)
    lists = ("tenants", "running_requests", "waiting_requests")
    assert {row["tenant"] for name in lists for row in replica[name]} == seen
    assert not any(name in text for name in {"ann", "bob"} - seen), "it names another tenant"
    most = 2 if asker == "root" else 1
    assert {step["decoding"] + step["prompts"] for step in replica["steps"]} == {most}, "others' rows are counted"


def test_live_stream_requires_a_key():
    assert request(FakeEngine(api_keys=API_KEYS), "GET", "/v1/live").status_code == 401


def test_live_stream_can_be_disabled():
    answer = request(FakeEngine(limits={"max_live_viewers": 0}), "GET", "/v1/live")
    assert answer.status_code == 429
    assert "serving_config.max_live_viewers" in answer.text


def test_live_head_request_occupies_no_viewer():
    async def run():
        app = create_app(FakeEngine(limits={"max_live_viewers": 1}))
        for _ in range(2):
            watcher = Watcher(app, method="HEAD")
            await watcher.task
            assert watcher.messages[0]["status"] == 200

    asyncio.run(run())


def test_disconnected_viewer_is_removed():
    async def run():
        app = create_app(FakeEngine(limits={"max_live_viewers": 1}))
        for _ in range(2):
            watcher = Watcher(app)
            assert (await watcher.events(2))[1][1]["silent"] == [0]
            refused = Watcher(app)
            await refused.task
            assert refused.messages[0]["status"] == 429
            watcher.leave()
            await watcher.task

    asyncio.run(run())
