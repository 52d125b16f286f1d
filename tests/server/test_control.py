"""Cancelling requests by their id, through the whole master: permissions, client responses and cleanup."""

from __future__ import annotations

import asyncio

import pytest
from llm_serving.config.tables import ApiKey
from llm_serving.observability.event_log import client_id_of
from llm_serving.server.middleware.authentication import hash_key
from support.gated_server import GatedServer
from support.server_client import error_of

KEYS = {name: name * 20 for name in ("a", "b", "root")}
API_KEYS = tuple(ApiKey(name=name, key_sha256=hash_key(key), admin=name == "root") for name, key in KEYS.items())
LONG = {"prompt": [5, 6, 7], "seed": 1, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
PATHS = [("POST", "/v1/requests/{}/cancel"), ("DELETE", "/v1/requests/{}")]


def as_tenant(name):
    return {"x-api-key": KEYS[name]}


def num_used_blocks(server):
    return server.replica.scheduler.blocks.pool.num_used_blocks


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize("request_id", ["mine", "cmpl-mine"])
def test_cancelled_request_returns_its_tokens_so_far(method, path, request_id):
    async def run():
        server = GatedServer()
        async with server.running() as client:
            server.runner.gate.clear()
            asking = asyncio.create_task(client.post("/v1/completions", json=LONG | {"request_id": "mine", "n": 2}))
            await server.reach(lambda: num_used_blocks(server) > 0)
            cancelled = await client.request(method, path.format(request_id))
            server.runner.gate.set()
            answer = await asking
            assert cancelled.status_code == 200
            result = cancelled.json()
            assert result["request_id"] == request_id
            assert [client_id_of(each) for each in result["cancelled"]] == ["mine", "mine"]
            assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["abort", "abort"]
            assert answer.json()["usage"]["completion_tokens"] < 400
            await server.reach(lambda: num_used_blocks(server) == 0)
            again = await client.request(method, path.format(request_id))
            assert (again.status_code, again.json()["cancelled"]) == (200, [])
            assert (await client.post("/v1/completions", json=LONG | {"max_tokens": 3})).status_code == 200

    asyncio.run(run())


def test_waiting_request_is_cancelled_before_it_runs():
    async def run():
        server = GatedServer(max_num_seqs=1)
        async with server.running() as client:
            server.runner.gate.clear()
            first = asyncio.create_task(client.post("/v1/completions", json=LONG | {"max_tokens": 5}))
            await server.reach(lambda: num_used_blocks(server) > 0)
            waiting = asyncio.create_task(client.post("/v1/completions", json=LONG | {"request_id": "w"}))
            await server.reach(lambda: server.engine.num_running == server.engine.num_waiting == 1)
            [cancelled] = (await client.post("/v1/requests/w/cancel")).json()["cancelled"]
            assert client_id_of(cancelled) == "w"
            server.runner.gate.set()
            answer = (await waiting).json()
            assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["text"]) == ("abort", "")
            assert (await first).json()["choices"][0]["finish_reason"] == "length"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/completions", LONG | {"stream": True}, '"finish_reason":"abort"'),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 300, "seed": 1, "stream": True},
            '"finish_reason":"abort"',
        ),
        (
            "/generate_stream",
            {"inputs": "x", "parameters": {"max_new_tokens": 300, "seed": 1}},
            '{"error":"the request was cancelled","error_type":"incomplete_generation"}',
        ),
        (
            "/models/demo/generate_stream",
            {"inputs": "x", "parameters": {"max_new_tokens": 300, "seed": 1}},
            '"finish_reason": "abort"',
        ),
    ],
)
def test_cancelled_stream_ends_in_every_protocol(path, body, expected):
    async def run():
        server = GatedServer()
        async with server.running(**{"x-request-id": "mine"}) as client:
            server.runner.gate.clear()
            asking = asyncio.create_task(client.post(path, json=body))
            await server.reach(lambda: num_used_blocks(server) > 0)
            await client.delete("/v1/requests/mine")
            server.runner.gate.set()
            answer = await asking
            assert answer.status_code == 200
            assert answer.headers["x-request-id"] == "mine"
            assert expected in answer.text

    asyncio.run(run())


def test_cancelled_tgi_response_is_an_error():
    async def run():
        server = GatedServer()
        async with server.running(**{"x-request-id": "mine"}) as client:
            server.runner.gate.clear()
            asking = asyncio.create_task(
                client.post("/generate", json={"inputs": "x", "parameters": {"max_new_tokens": 300, "seed": 1}})
            )
            await server.reach(lambda: num_used_blocks(server) > 0)
            await client.delete("/v1/requests/mine")
            server.runner.gate.set()
            answer = await asking
            assert (answer.status_code, answer.json()["error_type"]) == (409, "incomplete_generation")

    asyncio.run(run())


def test_tenant_cancels_its_own_requests_and_administrator_all():
    async def run():
        server = GatedServer(api_keys=API_KEYS)
        async with server.running() as client:
            server.runner.gate.clear()
            body = LONG | {"request_id": "same"}
            asking = [
                asyncio.create_task(client.post("/v1/completions", json=body, headers=as_tenant(name)))
                for name in ("a", "b")
            ]
            await server.reach(lambda: server.engine.num_running + server.engine.num_waiting == 2)
            path = "/v1/requests/{}/cancel"
            [theirs] = [each.request.request_id for each in server.engine.lookup.find("same", "b")]
            assert len(theirs.removeprefix("same-")) == 16, "it is predictable, or counts everybody's requests"
            foreign = await client.post(path.format(theirs), headers=as_tenant("a"))
            unknown = await client.post(path.format("same-9"), headers=as_tenant("a"))
            assert foreign.status_code == unknown.status_code == 404
            assert error_of(foreign)["code"] == "request_not_found"
            assert foreign.text.replace(theirs, "") == unknown.text.replace("same-9", ""), "it tells who exists"
            own = await client.post(path.format("same"), headers=as_tenant("a"))
            assert [client_id_of(each) for each in own.json()["cancelled"]] == ["same"]
            assert theirs not in own.json()["cancelled"]
            server.runner.gate.set()
            assert (await asking[0]).json()["choices"][0]["finish_reason"] == "abort"
            server.runner.gate.clear()
            others = await client.delete("/v1/requests/same", headers=as_tenant("root"))
            assert others.status_code == 200
            server.runner.gate.set()
            assert (await asking[1]).status_code == 200

    asyncio.run(run())


def test_changed_priority_reorders_waiting_requests():
    async def run():
        server = GatedServer(max_num_seqs=1)
        async with server.running() as client:
            server.runner.gate.clear()

            async def ask(name, **body):
                await client.post("/v1/completions", json=LONG | {"max_tokens": 3, "request_id": name} | body)

            async def explained(name):
                return (await client.get(f"/v1/requests/{name}/explain")).json()["requests"][0]

            tasks = [asyncio.create_task(ask("first", max_tokens=30))]
            await server.reach(lambda: server.engine.num_running == 1)
            for number, name in enumerate("abc"):
                tasks.append(asyncio.create_task(ask(name, priority_class="batch")))
                await server.reach(lambda n=number: server.engine.num_waiting == n + 1)
            body = {"priority_class": "standard"}
            moving = asyncio.create_task(client.post("/v1/requests/c/priority", json=body))
            await server.reach(lambda: len(server.replica._inbox.messages) == 4)
            server.runner.gate.set()
            answer = await moving
            result = answer.json()
            assert [client_id_of(each) for each in result.pop("changed")] == ["c"]
            assert (answer.status_code, result) == (
                200,
                {"request_id": "c", "priority": 0, "priority_class": "standard", "unchanged": []},
            )
            assert server.engine._queue.class_load("batch").num_waiting <= 2
            await asyncio.gather(*tasks)
            # Answers of steps that follow each other closely may reach their clients in another order.
            first_steps = [(await explained(name))["steps"]["first"] for name in ("first", "c", "a", "b")]
            assert first_steps == sorted(set(first_steps))
            assert server.engine._queue.load().num_running == server.engine._queue.load().num_waiting == 0
            assert (await explained("c"))["request_class"] == "standard"
            assert (await client.post("/v1/requests/c/priority", json=body)).json()["changed"] == []
            assert (await client.post("/v1/requests/nobody/priority", json=body)).status_code == 404

    asyncio.run(run())


def test_changed_priority_applies_to_all_beams():
    async def run():
        server = GatedServer()
        async with server.running() as client:
            server.runner.gate.clear()
            body = LONG | {"use_beam_search": True, "best_of": 3, "request_id": "beams", "max_tokens": 60}
            asking = asyncio.create_task(client.post("/v1/completions", json=body))
            await server.reach(lambda: num_used_blocks(server) > 0)
            moving = asyncio.create_task(client.post("/v1/requests/beams/priority", json={"priority": 1}))
            await server.reach(lambda: bool(server.replica._inbox.messages))
            server.runner.gate.set()
            assert [client_id_of(each) for each in (await moving).json()["changed"]] == ["beams"]
            assert (await asking).status_code == 200
            explained = (await client.get("/v1/requests/beams/explain")).json()["requests"][0]
            assert explained["request_class"] == "batch"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({}, 400, "`priority` or `priority_class` must be given"),
        ({"priority": 0, "priority_class": "batch"}, 400, "must not be given together"),
        ({"priority_class": "urgent"}, 400, "`priority_class` must be one of interactive, standard, batch"),
        ({"priority": 10**6 + 1}, 400, "`priority` must be an integer from -1000000 to 1000000"),
        ({"priority": -1}, 403, "`priority` must not go before class standard, rank 0, with the API key of a"),
        ({"priority": 1}, 404, "`request_id` must be the id of an unfinished request"),
    ],
)
def test_changed_priority_is_checked_like_a_new_request(body, status, named):
    async def run():
        keys = (ApiKey(name="a", key_sha256=hash_key(KEYS["a"]), highest_class="standard"),)
        async with GatedServer(api_keys=keys).running(**as_tenant("a")) as client:
            answer = await client.post("/v1/requests/x/priority", json=body)
            assert answer.status_code == status
            assert named in error_of(answer)["message"]

    asyncio.run(run())


def test_priority_of_another_tenants_request_is_not_changed():
    async def run():
        server = GatedServer(api_keys=API_KEYS)
        async with server.running() as client:
            server.runner.gate.clear()
            asking = asyncio.create_task(
                client.post("/v1/completions", json=LONG | {"request_id": "x"}, headers=as_tenant("a"))
            )
            await server.reach(lambda: server.engine.num_running == 1)
            answer = await client.post("/v1/requests/x/priority", json={"priority": 9}, headers=as_tenant("b"))
            assert (answer.status_code, error_of(answer)["code"]) == (404, "request_not_found")
            await client.delete("/v1/requests/x", headers=as_tenant("a"))
            server.runner.gate.set()
            await asking

    asyncio.run(run())


def test_cancel_without_a_key_is_refused():
    async def run():
        async with GatedServer(api_keys=API_KEYS).running() as client:
            for method, path in PATHS:
                assert (await client.request(method, path.format("x"))).status_code == 401

    asyncio.run(run())
