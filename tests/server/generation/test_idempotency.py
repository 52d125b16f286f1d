"""Idempotency-Key: a repeated request with the same key gets the same response, computed once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from llm_serving.config.sections.lora import LoraConfig
from llm_serving.core.request import FinishReason
from llm_serving.engine.adapters import Adapter
from llm_serving.server.app import create_app
from llm_serving.server.idempotency.request import seed_of
from support.fakes import FakeEngine, Piece, Script
from support.gated_server import GatedServer
from support.server_client import error_of
from support.tool_cases import CALL, HERMES, tokenizer_with

PATH = "/v1/completions"
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
BODY = {"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}


def keyed(key="k", **headers):
    return {"Idempotency-Key": key, **headers}


@pytest.mark.parametrize("stream", [False, True])
def test_idempotency_key_returns_the_same_bytes_without_computing(stream):
    async def run():
        server = GatedServer()
        async with server.running() as client:
            body = BODY | {"stream": stream}
            first = await client.post(PATH, json=body, headers=keyed())
            again = await client.post(PATH, json=dict(reversed(body.items())), headers=keyed())
            assert (first.status_code, again.content) == (200, first.content)
            assert server.num_computed == 6
            assert "idempotent-replayed" not in first.headers
            assert again.headers["idempotent-replayed"] == "true"
            assert again.headers["x-request-id"] == first.headers["x-request-id"]
            other = await client.post(PATH, json=body, headers=keyed("other"))
            assert other.content != first.content, "another seed was drawn, or another id at least"
            assert server.num_computed == 12

    asyncio.run(run())


def test_idempotency_key_of_another_request_is_refused():
    async def run():
        server = GatedServer()
        async with server.running() as client:
            await client.post(PATH, json=BODY, headers=keyed())
            refused = await client.post(PATH, json=BODY | {"max_tokens": 5}, headers=keyed())
            assert refused.status_code == 422
            assert error_of(refused)["code"] == "idempotency_key_reused"
            chat = {"messages": [{"role": "user", "content": "x"}]}
            assert (await client.post("/v1/chat/completions", json=chat, headers=keyed())).status_code == 422
            others = BODY | {"max_tokens": 5, "user": "somebody else"}
            assert (await client.post(PATH, json=others, headers=keyed())).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize("serving", [{}, {"coalesce_identical_requests": True}])
@pytest.mark.parametrize("prompt", [[2**70], [[5, 6], [5, -(2**70)]]])
def test_idempotency_key_keeps_token_id_validation(serving, prompt):
    async def run():
        async with GatedServer(serving=serving).running() as client:
            for headers in ({}, keyed()):
                refused = await client.post(PATH, json=BODY | {"prompt": prompt, "temperature": 0}, headers=headers)
                assert refused.status_code == 400
                assert error_of(refused)["param"] == "prompt"

    asyncio.run(run())


def test_idempotent_request_in_flight_is_joined():
    async def run():
        server = GatedServer()
        async with server.running() as client:
            server.runner.gate.clear()
            tasks = [asyncio.create_task(client.post(PATH, json=BODY, headers=keyed())) for _ in range(3)]
            await server.reach(lambda: len(server.site.routes.accepted) == 1)
            server.runner.gate.set()
            answers = [await task for task in tasks]
            assert len({answer.content for answer in answers}) == 1
            assert server.num_computed == 6

    asyncio.run(run())


def test_joined_request_keeps_its_own_deadline():
    class Log:
        async def append(self, record):
            await written.wait()

    written = asyncio.Event()

    async def run():
        server = GatedServer()
        server.site.routes.accepted.log = Log()
        async with server.running() as client:
            first = asyncio.create_task(client.post(PATH, json=BODY, headers=keyed()))
            await server.reach(lambda: len(server.site.routes.accepted) == 1)
            async with asyncio.timeout(30):
                late = await client.post(PATH, json=BODY, headers=keyed() | {"x-request-timeout-s": "0.01"})
            assert (late.status_code, error_of(late)["code"]) == (504, "timeout")
            assert not first.done()
            written.set()
            assert (await first).status_code == 200

    asyncio.run(run())


def test_refused_request_is_not_recorded():
    async def run():
        server = GatedServer()
        async with server.running() as client:
            bad = BODY | {"max_tokens": 10**6}
            assert (await client.post(PATH, json=bad, headers=keyed())).status_code == 400
            assert (await client.post(PATH, json=BODY, headers=keyed())).status_code == 200
            too_long = await client.post(PATH, json=BODY, headers=keyed("x" * 300))
            assert (too_long.status_code, error_of(too_long)["param"]) == (400, "Idempotency-Key")

    asyncio.run(run())


def test_evicted_response_is_recomputed_with_the_same_seed_and_id():
    async def run():
        server = GatedServer()
        async with server.running() as client:
            first = await client.post(PATH, json=BODY, headers=keyed())
            for kept in list(server.engine.coalesced._kept.values()):
                server.engine.coalesced.forget(kept)
            again = await client.post(PATH, json=BODY, headers=keyed())
            whole, repeated = first.json(), again.json()
            for each in (whole, repeated):
                each["usage"].pop("prompt_tokens_details")  # depends on the server that computed the prompt
            assert repeated == whole
            assert server.num_computed == 12

    asyncio.run(run())


@pytest.mark.parametrize("loses", [lambda server: server.site.routes.accepted, None])
def test_evicted_key_recomputes_the_same_tokens(loses):
    """In the same server, or in the next one, which has no record of it."""

    async def run():
        server = GatedServer()
        body = BODY | {"temperature": 1.0}
        async with server.running() as client:
            first = await client.post(PATH, json=body, headers=keyed())
            if loses is not None:
                accepted = loses(server)
                accepted._forget(next(iter(accepted._records.values())))
                again = await client.post(PATH, json=body, headers=keyed())
        if loses is None:
            async with GatedServer().running() as client:
                again = await client.post(PATH, json=body, headers=keyed())
        assert "idempotent-replayed" not in again.headers
        assert again.json()["id"] != first.json()["id"]
        assert again.json()["choices"] == first.json()["choices"]

    asyncio.run(run())


def test_derived_seed_depends_on_key_tenant_and_body():
    seeds = {seed_of(tenant, key, body) for tenant in ("", "a", "ab") for key in ("b", "ab") for body in (b"1", b"2")}
    assert len(seeds) == 12
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_idempotency_key_without_request_log_has_no_effect():
    async def run():
        server = GatedServer(serving={"request_log": "none"})
        async with server.running() as client:
            first = await client.post(PATH, json=BODY, headers=keyed())
            again = await client.post(PATH, json=BODY, headers=keyed())
            assert first.json()["id"] != again.json()["id"]

    asyncio.run(run())


def test_coalesced_requests_are_computed_once():
    async def run():
        server = GatedServer(max_num_seqs=8, serving={"coalesce_identical_requests": True})
        async with server.running() as client:
            body = BODY | {"seed": 4, "temperature": 1.0}
            bodies = [body, body, body | {"cache_salt": "x"}, body | {"user": "bob"}, body | {"priority": 1}]
            server.runner.gate.clear()
            tasks = [asyncio.create_task(client.post(PATH, json=each)) for each in bodies]
            await server.reach(lambda: server.num_readers == 5)
            assert server.engine.num_waiting + server.engine.num_running == 4
            server.runner.gate.set()
            answers = [(await task).json() for task in tasks]
            assert len({answer["id"] for answer in answers}) == 5, "each has its own"
            assert len({str(answer["choices"]) for answer in answers}) == 1
            explained = [(await client.get(f"/v1/requests/{each['id']}/explain")).json() for each in answers[:2]]
            assert explained[0]["requests"] == explained[1]["requests"]
            assert explained[0]["requests"][0]["num_sharing"] == 1

    asyncio.run(run())


def test_answers_of_adapters_are_neither_shared_nor_repeated_with_other_files():
    def adapter(digit):
        return Adapter("one", Path("one"), digit * 64)

    async def run():
        lora = LoraConfig(lora_folder=Path("adapters"))
        server = GatedServer(max_num_seqs=8, serving={"coalesce_identical_requests": True}, lora=lora)
        adapters = server.engine.adapters
        adapters.add(adapter("1"))
        async with server.running() as client:
            body = BODY | {"temperature": 0}
            server.runner.gate.clear()
            tasks = [asyncio.create_task(client.post(PATH, json=body | {"model": name})) for name in ("demo", "one")]
            await server.reach(lambda: server.engine.num_waiting + server.engine.num_running == 2)
            server.runner.gate.set()
            assert [(await task).json()["model"] for task in tasks] == ["demo", "one"]
            of_one = body | {"model": "one"}
            first = await client.post(PATH, json=of_one, headers=keyed())
            assert (await client.post(PATH, json=of_one, headers=keyed())).content == first.content
            adapters.remove("one")
            adapters.add(adapter("2"))
            gone = await client.post(PATH, json=of_one, headers=keyed())
            assert (gone.status_code, error_of(gone)["code"]) == (410, "gone")

    asyncio.run(run())


@pytest.mark.parametrize("n", [1, 3])
def test_coalesced_choices_are_shared_separately(n):
    async def run():
        server = GatedServer()
        async with server.running() as client:
            body = BODY | {"n": n, "temperature": 1.0, "prompt": [[5, 6], [7, 8, 9]]}
            first = await client.post(PATH, json=body, headers=keyed())
            again = await client.post(PATH, json=body, headers=keyed())
            assert again.content == first.content
            assert len(first.json()["choices"]) == 2 * n

    asyncio.run(run())


def test_repeated_tool_calls_have_the_same_ids():
    async def run():
        engine = FakeEngine(Script((Piece(CALL),), FinishReason.STOP), max_body_bytes=2**16)
        engine.tokenizer = tokenizer_with(HERMES)
        transport = httpx.ASGITransport(create_app(engine))
        body = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answers = [
                (await client.post("/v1/chat/completions", json=body, headers=keyed(key))).json() for key in "aab"
            ]
        ids = [answer["choices"][0]["message"]["tool_calls"][0]["id"] for answer in answers]
        assert ids[0] == ids[1] != ids[2]

    asyncio.run(run())
