"""Replica routes over HTTP."""

from __future__ import annotations

import asyncio

from llm_serving.config.tables import ApiKey
from llm_serving.server.middleware.authentication import hash_key
from support.gated_server import GatedServer
from support.server_client import error_of

KEYS = {name: name * 20 for name in ("a", "root")}
API_KEYS = tuple(ApiKey(name=name, key_sha256=hash_key(key), admin=name == "root") for name, key in KEYS.items())


def test_replica_is_drained_and_joins_again() -> None:
    async def run() -> None:
        server = GatedServer(serving={"agent_ports": (1, 2)})
        async with server.running() as client:
            await server.reach(lambda: not server.engine.health().loading)
            assert (await client.get("/v1/replicas")).json() == {
                "replicas": [
                    {"replica": index, "state": "serving", "num_unfinished": 0, "machine": ""} for index in (0, 1)
                ]
            }
            drained = await client.post("/v1/replicas/1/drain")
            assert drained.status_code == 200
            await server.reach(lambda: server.engine.replicas.state(1) == "left")
            refused = await client.post("/v1/replicas/0/drain")
            assert refused.status_code == 400
            assert error_of(refused)["message"] == "`replica` must not be the only replica that serves. Given: 0"
            joined = (await client.post("/v1/replicas/1/join")).json()["replicas"]
            assert [each["replica"] for each in joined] == [0, 1]
            await server.reach(lambda: server.engine.replicas.state(1) == "serving")
            for path in ("/v1/replicas/7/drain", "/v1/replicas/x/drain", "/v1/replicas/-1/join", "/v1/replicas/²/join"):
                assert (await client.post(path)).status_code == 400

    asyncio.run(run())


def test_replica_routes_require_an_administrator() -> None:
    async def run() -> None:
        server = GatedServer(api_keys=API_KEYS)
        async with server.running() as client:
            for method, path in (
                ("GET", "/v1/replicas"),
                ("POST", "/v1/replicas/0/drain"),
                ("POST", "/v1/replicas/0/join"),
            ):
                refused = await client.request(method, path, headers={"x-api-key": KEYS["a"]})
                assert refused.status_code == 403
                allowed = await client.request(method, path, headers={"x-api-key": KEYS["root"]})
                assert allowed.status_code in (200, 400)

    asyncio.run(run())
