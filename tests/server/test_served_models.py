"""Several models behind one address, with fake engines: how a request selects its model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from llm_serving import master
from llm_serving.config.sections.lora import LoraConfig
from llm_serving.config.tables import ApiKey
from llm_serving.engine.adapters import Adapter
from llm_serving.engine.lifecycle import Lifecycle
from llm_serving.errors import ConfigError, ModelError, RequestError, RequestNotFoundError, UnavailableError
from llm_serving.observability.metrics import WorkAgentMemory
from llm_serving.server.app import build_site
from llm_serving.server.middleware.authentication import hash_key
from llm_serving.server.served_models import OpenedModel, ServedModels
from support.fakes import FakeEngine

KEYS = {name: name * 20 for name in ("a", "root")}
API_KEYS = tuple(ApiKey(name=name, key_sha256=hash_key(key), admin=name == "root") for name, key in KEYS.items())


class Engine(FakeEngine):
    def find(self, request_id: str, tenant: str | None) -> list[object]:
        found: list[object] = [each for each in self.submitted if each.request_id == request_id]
        if not found:
            raise RequestNotFoundError("request_id", "must be known", request_id)
        return found


def engine(name: str, *aliases: str, api_keys: tuple[ApiKey, ...] = ()) -> Any:
    made = Engine(model_name=name, api_keys=api_keys)
    made.config = replace(made.config, model=replace(made.config.model, model_aliases=aliases))
    return made


def opened(config: Any, reserved_bytes: int) -> OpenedModel:
    raise AssertionError(f"{config.model.model_name} must not be loaded")


def serve(use: Callable[[httpx.AsyncClient], Awaitable[None]], *engines: Any) -> None:
    async def run() -> None:
        site = build_site(engines[0], others=[OpenedModel(each) for each in engines[1:]], open_model=opened)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(site.public), base_url="http://localhost") as client:
            await use(client)

    asyncio.run(run())


@pytest.mark.parametrize(("model", "index"), [("one", 0), ("two", 1), ("second", 1), (None, 0), ("", 0)])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_the_field_model_selects(path: str, model: str | None, index: int) -> None:
    engines = engine("one", "first"), engine("two", "second")

    async def use(client: httpx.AsyncClient) -> None:
        body: dict[str, Any] = {"model": model, "max_tokens": 4}
        body |= {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
        answer = await client.post(path, json=body)
        if model == "" or (model is None and path == "/v1/messages"):
            assert answer.status_code in (200, 400)
            return
        assert answer.status_code == 200, answer.text
        assert [len(each.submitted) for each in engines] == [1 - index, index]
        assert answer.json()["model"] == ("one", "two")[index]

    serve(use, *engines)


def test_the_path_of_an_older_route_selects() -> None:
    engines = engine("one", "first"), engine("two", "a/second")

    async def use(client: httpx.AsyncClient) -> None:
        for name in ("two", "a/second", "first"):
            for path in (f"/models/{name}/generate", f"/models/{name}/generate_stream", f"/models/{name}"):
                answer = await client.post(path, json={"inputs": "a", "parameters": {"max_new_tokens": 4}})
                assert answer.status_code == 200, answer.text
        assert [len(each.submitted) for each in engines] == [3, 6]
        assert (await client.post("/models/three/generate", json={"inputs": "a"})).status_code == 404

    serve(use, *engines)


def test_an_unknown_model_is_refused_in_the_form_of_the_protocol() -> None:
    async def use(client: httpx.AsyncClient) -> None:
        for path in ("/v1/completions", "/v1/messages"):
            answer = await client.post(path, json={"model": "three", "prompt": "a"})
            assert (answer.status_code, "x-request-id" in answer.headers) == (404, True)
            assert "must be one of the served models: one, two. Given: 'three'" in answer.text
        assert (await client.post("/v1/messages", json={"model": "three"})).json()["type"] == "error"
        assert (await client.get("/v1/models/three")).status_code == 404

    serve(use, engine("one"), engine("two"))


def test_malformed_and_long_bodies_are_refused_as_with_one_model() -> None:
    async def use(client: httpx.AsyncClient) -> None:
        for content in (b"{", b"[]", b'{"model": 3, "prompt": "a"}', b"\xff", b'{"model": "one", "model": "two"}'):
            answer = await client.post("/v1/completions", content=content)
            assert answer.status_code == 400, content
        assert (await client.post("/v1/completions", content=b" " * 5000)).status_code == 413

    serve(use, engine("one"), engine("two"))


def test_routes_without_body_select_by_query_or_request_id() -> None:
    engines = engine("one"), engine("two")

    async def use(client: httpx.AsyncClient) -> None:
        for query, name in (("", "one"), ("?model=two", "two")):
            assert (await client.get(f"/v1/parameters{query}")).json()["model"] == name
        assert (await client.get("/v1/parameters?model=three")).status_code == 404
        assert (await client.get("/v1/timeline?model=two&steps=7")).status_code == 200
        assert (engines[0].asked, engines[1].asked) == ([], [(7, None)])
        assert (await client.get("/v1/parameters?other=1")).status_code == 400
        body = {"model": "two", "prompt": "a", "request_id": "mine"}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert (await client.post("/v1/requests/mine/cancel")).json()["cancelled"] == ["mine"]
        assert engines[1].asked[-1] == ("mine", None)

    serve(use, *engines)


def test_health_models_and_metrics_show_all_or_the_selected_model() -> None:
    engines = engine("one"), engine("two", "second")
    engines[1].ready = False

    async def use(client: httpx.AsyncClient) -> None:
        health = await client.get("/health")
        assert (health.status_code, health.json()["loading"]) == (200, True)
        assert health.json()["detail"] == "one: ready; two: loading the model"
        assert (await client.get("/health?model=second")).status_code == 503
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["aliases"]) for card in cards] == [("one", []), ("two", ["second"])]
        assert (await client.get("/v1/models/second")).json()["id"] == "two"
        names = [line for line in (await client.get("/metrics")).text.splitlines() if "steps_total{" in line]
        assert len(names) == 2, "the fakes have equal labels"

    serve(use, *engines)


def test_batches_wait_only_while_no_model_serves() -> None:
    engines = engine("one"), engine("two")
    site = build_site(engines[0], others=[OpenedModel(engines[1])], open_model=opened)
    engines[0].ready = False
    assert site.internal.ready()
    engines[1].ready = False
    assert not site.internal.ready()


def test_models_are_changed_by_administrators_only() -> None:
    async def use(client: httpx.AsyncClient) -> None:
        for action in ("load", "replace", "unload"):
            path = f"/v1/models/two/{action}"
            assert (await client.post(path)).status_code == 401
            assert (await client.post(path, headers={"x-api-key": KEYS["a"]})).status_code == 403
        root = {"x-api-key": KEYS["root"]}
        refused = await client.post("/v1/models/one/unload", headers=root)
        assert "`model` must not be the default model" in refused.json()["error"]["message"]
        assert (await client.post("/v1/models/three/unload", headers=root)).status_code == 404
        refused = await client.post("/v1/models/three/load", headers=root)
        assert "there is no YAML to read again" in refused.json()["error"]["message"]

    serve(use, engine("one", api_keys=API_KEYS), engine("two", api_keys=API_KEYS))


def loadable(name: str, *failures: str, adapters: tuple[str, ...] = ()) -> Any:
    made = engine(name)
    counts = SimpleNamespace(num_ready=not failures, num_replicas=1)
    made.replicas = SimpleNamespace(counts=lambda: counts, load_failures=list(failures))
    made.adapters.by_name = {each: Adapter(each, Path(each), "1" * 64) for each in adapters}
    made.add_adapter = lambda registry, adapter: registry.add(adapter)
    return made


def config_of(name: str, *aliases: str, **lora: Any) -> Any:
    return replace(engine(name, *aliases).config, lora=LoraConfig(**lora))


def models_of(*opened: Any) -> ServedModels:
    waiting = list(opened[1:])
    return build_site(opened[0], open_model=lambda config, reserved: OpenedModel(waiting.pop(0))).models


def test_a_model_that_cannot_be_loaded_is_stopped_and_can_be_loaded_later() -> None:
    async def run() -> None:
        failing, working = loadable("two", "no such tensor"), loadable("two")
        models = models_of(loadable("one"), failing, working)
        with pytest.raises(UnavailableError, match="model two was not loaded: no such tensor"):
            await models.load(config_of("two"))
        assert (failing.num_starts, failing.num_stops) == (1, 1)
        await models.load(config_of("two"))
        assert models.find("two").engine is working
        with pytest.raises(RequestError, match="`model` is loaded already"):
            await models.load(config_of("two"))

    asyncio.run(run())


def test_a_shutdown_does_not_wait_for_a_model_that_is_loaded() -> None:
    async def run() -> None:
        loading = loadable("two")
        loading.replicas.counts().num_ready = 0
        models = models_of(loadable("one"), loading)
        task = asyncio.create_task(models.load(config_of("two")))
        while not loading.num_starts:
            await asyncio.sleep(0)
        models.begin_shutdown()
        with pytest.raises(UnavailableError, match="model two was not loaded: the server is shutting down"):
            await task
        assert loading.num_stops == 1

    asyncio.run(run())


def test_a_loaded_model_counts_with_the_part_of_its_cache_that_it_has_not_used_yet() -> None:
    async def run() -> None:
        first, second, asleep = (loadable(name) for name in ("one", "two", "three"))
        for each, memory in ((first, (100, 30, 1)), (second, (50, 50, 1)), (asleep, (70, 0, 0))):
            each.metrics.memory[0] = lambda memory=memory: WorkAgentMemory(*memory)
        given: list[int] = []

        def open_model(config: Any, reserved_bytes: int) -> OpenedModel:
            given.append(reserved_bytes)
            return OpenedModel(loadable(config.model.model_name))

        models = build_site(first, others=[OpenedModel(second), OpenedModel(asleep)], open_model=open_model).models
        await models.load(config_of("four"))
        assert given == [70]

    asyncio.run(run())


def test_names_of_models_and_adapters_differ_also_while_a_model_is_loaded() -> None:
    async def run() -> None:
        loading, other = loadable("two"), loadable("three")
        loading.replicas.counts().num_ready = 0
        models = models_of(loadable("one", adapters=("sql",)), loading, other)
        for config in (config_of("sql"), config_of("two", "sql"), config_of("two", lora_modules={"sql": Path("sql")})):
            with pytest.raises(RequestError, match="must not share names with the model one: 'sql'"):
                await models.load(config)
        task = asyncio.create_task(models.load(config_of("two", "second")))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="is being loaded by another request"):
            await models.load(config_of("two"))
        with pytest.raises(RequestError, match="`lora_name` must not share names with the model two: 'second'"):
            models.check_names("lora_name", ["second"], "one")
        later = asyncio.create_task(models.load(config_of("three")))
        await asyncio.sleep(0.06)
        assert (loading.num_starts, other.num_starts) == (1, 0), "one at a time is checked against the free memory"
        loading.replicas.counts().num_ready = 1
        await asyncio.gather(task, later)
        assert [model.name for model in models] == ["one", "two", "three"]

    asyncio.run(run())


@pytest.mark.parametrize("second", ["one", "two"])
def test_only_one_of_two_concurrent_adapter_loads_succeeds(second: str, tmp_path: Path) -> None:
    (tmp_path / "sql").mkdir()
    both_read = Barrier(2, timeout=30)

    def read(name: str, folder: Path) -> Adapter:
        both_read.wait()
        return Adapter(name, folder, "1" * 64)

    engines = loadable("one"), loadable("two")
    for each in engines:
        each.config = replace(each.config, lora=LoraConfig(lora_folder=tmp_path))
        each.adapters.config, each.adapters.read = each.config.lora, read

    async def use(client: httpx.AsyncClient) -> None:
        def load(model: str) -> Awaitable[httpx.Response]:
            url = f"/v1/load_lora_adapter?model={model}"
            return client.post(url, json={"lora_name": "sql", "lora_path": "sql"})

        answers = await asyncio.gather(load("one"), load(second))
        assert sorted(answer.status_code for answer in answers) == [200, 400]
        later = await asyncio.gather(load("one"), load(second))
        refused = max(answers, key=lambda answer: answer.status_code).json()["error"]
        assert refused["param"] == "lora_name"
        assert refused in [answer.json()["error"] for answer in later]

    serve(use, *engines)


def test_a_replaced_model_keeps_its_adapters_and_cannot_pause_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        before, after = loadable("one", adapters=("sql", "lost")), loadable("one")
        before.num_waiting = 0
        before.lifecycle = Lifecycle(before.config, SimpleNamespace(replicas=None), None)  # type: ignore[arg-type]
        after.replicas.counts().num_ready = 0

        def read(name: str, folder: Path) -> Adapter:
            if name == "lost":
                raise ModelError("there is no such folder")
            return Adapter(name, folder, "1" * 64)

        monkeypatch.setattr(after.adapters, "read", read)
        models = models_of(before, after)
        models.on_ready = ready = Mock()
        before.num_running = 1
        before.submitted.append(SimpleNamespace(request_id="running"))
        task = asyncio.create_task(models.replace(config_of("one")))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="is being changed by another request"):
            await before.lifecycle.pause("finish", "wait")
        after.replicas.counts().num_ready = 1
        await task
        assert models.default.engine is after
        ready.assert_called_once_with(after)
        assert [*after.adapters.by_name] == ["sql"]
        assert models._of_request("running").engine is before, "it can still be cancelled"
        before.num_running = 0
        while not before.num_stops:
            await asyncio.sleep(0)

    asyncio.run(run())


def test_one_model_has_no_models_to_change() -> None:
    async def run() -> None:
        app = build_site(engine("one")).public
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            refused = await client.post("/v1/models/one/replace")
            assert "only if the YAML has the section `models`" in refused.json()["error"]["message"]

    asyncio.run(run())


def test_a_model_given_twice_in_the_query_is_refused() -> None:
    async def use(client: httpx.AsyncClient) -> None:
        refused = await client.get("/v1/parameters?model=one&model=two")
        assert refused.status_code == 400
        assert "`model` must be given once. Given: 'two'" in refused.json()["error"]["message"]

    serve(use, engine("one"), engine("two"))


def test_a_model_whose_routes_cannot_be_built_is_closed() -> None:
    async def run() -> None:
        closed: list[str] = []

        def routes_of(engine: Any) -> Any:
            if engine is failing:
                raise ConfigError("serving_config.receipts: the package is missing")
            return SimpleNamespace(batches=None)

        failing = loadable("two")
        models = ServedModels(
            (), routes_of, lambda config, reserved: OpenedModel(failing, lambda: closed.append("two"))
        )
        models.add(OpenedModel(loadable("one")))
        with pytest.raises(RequestError, match="`model` cannot be loaded: serving_config"):
            await models.load(config_of("two"))
        assert closed == ["two"]

    asyncio.run(run())


def test_a_start_that_fails_closes_the_models_opened_before(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def open_model(config: Any) -> OpenedModel:
        if config.model.model_name == "two":
            raise ConfigError("the folder is missing")
        return OpenedModel(engine("one"), lambda: closed.append("one"))

    monkeypatch.setattr(master, "open_model", open_model)
    monkeypatch.setattr(master, "check_memory", lambda configs: None)
    with pytest.raises(ConfigError):
        master.run(replace(config_of("one"), models=(config_of("one"), config_of("two"))))
    assert closed == ["one"]
