"""The models of a server by name: each has an engine and routes of its own. Requests select one by `model`.
A server with several models reads each body once, to find `model`, and passes the request to that model's routes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qsl, urlencode

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from llm_serving.config.models import all_names_of, names_of
from llm_serving.config.schema import ServingConfig
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.replicas import EngineHealth
from llm_serving.errors import (
    ConfigError,
    LLMServingError,
    ModelError,
    ModelNotFoundError,
    RequestError,
    RequestNotFoundError,
    UnavailableError,
    shorten,
)
from llm_serving.log import get_logger, logged_model
from llm_serving.observability.metrics import log_throughput
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.parsing.body import ANY_MODEL, read_body
from llm_serving.server.parsing.errors import openai_error_response
from llm_serving.server.parsing.offload import INLINE_BYTES, off_loop
from llm_serving.server.request_context import request_context_of

if TYPE_CHECKING:
    from llm_serving.server.app import Application

logger = get_logger(__name__)

QUERY: Final = "model"
"""Query parameter that selects a model for routes without a body."""
SELECTED_KEY: Final = "llm_serving.selected_model"
REQUESTS_PATH: Final = "/v1/requests/"
STREAMS_PATH: Final = "/v1/streams/"
OLDER_PATH: Final = "/models/"
POLL_S: Final = 0.05


class OpenedModel(NamedTuple):
    """The engine of a model before its start, and a function to call after its stop."""

    engine: AsyncEngine
    close: Callable[[], None] = lambda: None


OpenModel = Callable[[ServingConfig, int], OpenedModel]
"""(configuration, bytes of memory for other models) -> the opened model. Raises LLMServingError if it is unusable."""


class ServedModel:
    def __init__(self, opened: OpenedModel, routes: Application) -> None:
        self.engine, self._close = opened
        self.routes = routes
        self.num_open = 0
        """HTTP requests that the routes are handling. Counted only if the server has several models."""
        self._throughput: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.engine.config.model.model_name

    @property
    def is_ready(self) -> bool:
        counts = self.engine.replicas.counts()
        return counts.num_ready == counts.num_replicas

    def start(self) -> None:
        self.engine.start()
        self.routes.receipts.start()
        if interval_s := self.engine.config.serving.throughput_interval_s:
            self._throughput = asyncio.create_task(log_throughput(self.engine.metrics, self.engine.clock, interval_s))

    async def stop(self) -> None:
        if self._throughput is not None:
            self._throughput.cancel()
        await self.routes.advisor.close()
        await self.engine.stop()
        self._close()

    async def drain(self) -> None:
        self.routes.live.close()
        while self.num_open or self.engine.num_running or self.engine.num_waiting:
            await asyncio.sleep(POLL_S)
        await self.stop()
        logger.info("model %s has stopped after its last request", self.name)


class ServedModels:
    """The models of a server by name, the default first. As an ASGI application it passes each request to a model."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        routes_of: Callable[[AsyncEngine], Application],
        open_model: OpenModel | None,
    ) -> None:
        self._models: dict[str, ServedModel] = {}
        self._routes_of = routes_of
        self._open = open_model
        self._changing: dict[str, ServingConfig] = {}
        self._loading: set[ServedModel] = set()
        self._turn = asyncio.Lock()
        self._is_ending = False
        self.on_ready: Callable[[AsyncEngine], None] = lambda engine: None
        """Called with the engine of each model that was loaded at run time."""
        self._drains: dict[asyncio.Task[None], ServedModel] = {}
        self._by_body = {
            endpoint.path: endpoint
            for endpoint in endpoints
            if endpoint.body is not None and "model" in getattr(endpoint.body, "__struct_fields__", ())
        }

    def add(self, opened: OpenedModel) -> ServedModel:
        model = self._made(opened)
        self._models[model.name] = model
        return model

    def _made(self, opened: OpenedModel) -> ServedModel:
        if self._models:
            opened.engine.share_tenants(self.default.engine)
        return ServedModel(opened, self._routes_of(opened.engine))

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(list(self._models.values()))

    @property
    def default(self) -> ServedModel:
        return next(iter(self._models.values()))

    def find(self, name: str) -> ServedModel:
        if name in self._models:
            return self._models[name]
        for alias in (name, ANY_MODEL):
            for model in self:
                if alias in names_of(model.engine.config) or alias in model.engine.adapters.by_name:
                    return model
        return self.check_served(name)

    # --- requests ---------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._by_body.get(scope["path"]) if scope.get("method") == "POST" else None
        try:
            if endpoint is not None:
                model, receive = await self._by_field(scope, receive)
            else:
                model, scope = self._by_url(scope)
        except LLMServingError as error:
            await self._refuse(endpoint, error, Request(scope))(scope, receive, send)
            return
        except ClientDisconnect:
            await Response(status_code=499)(scope, receive, send)
            return
        model.num_open += 1
        logged_model.set(model.name)
        try:
            await model.routes(scope, receive, send)
        finally:
            model.num_open -= 1

    def _refuse(self, endpoint: Endpoint | None, error: LLMServingError, request: Request) -> Response:
        if endpoint is None:
            return openai_error_response(error)
        request_context_of(request).route = endpoint.path
        return endpoint.refuse(request, error)

    async def _by_field(self, scope: Scope, receive: Receive) -> tuple[ServedModel, Receive]:
        body = await read_body(Request(scope, receive), self.default.engine.config.serving)
        name = await off_loop(len(body) > INLINE_BYTES, lambda: _model_field(body))
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return unread.pop() if unread else await receive()

        return self.find(name) if name else self.default, receive_again

    def _by_url(self, scope: Scope) -> tuple[ServedModel, Scope]:
        """Return the model that the URL selects, else the default, and the ASGI scope without the query parameter
        `model`. The URL selects a model by this parameter, by a request id or stream id in the path, or by the model
        name in a path of the older `llm-serving` server.
        """
        path: str = scope["path"]
        if scope["query_string"]:
            items = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            if names := [value for key, value in items if key == QUERY]:
                if len(names) > 1:
                    raise RequestError(QUERY, "must be given once", names[1])
                rest = urlencode([item for item in items if item[0] != QUERY]).encode()
                return self.find(names[0]), {**scope, "query_string": rest, SELECTED_KEY: True}
        if path.startswith(REQUESTS_PATH):
            return self._of_request(path.removeprefix(REQUESTS_PATH).partition("/")[0]), scope
        if path.startswith(STREAMS_PATH):
            record = self.default.routes.accepted.peek(path.removeprefix(STREAMS_PATH))
            if record is not None and (name := _model_field(record.request)):
                return self.find(name), scope
        if path.startswith(OLDER_PATH):
            with contextlib.suppress(ModelNotFoundError):  # the route refuses the name in its own form
                name = path.removeprefix(OLDER_PATH).removesuffix("/generate_stream").removesuffix("/generate")
                return self.find(name), scope
        return self.default, scope

    def _of_request(self, request_id: str) -> ServedModel:
        models: list[ServedModel] = [*self, *self._drains.values()]
        for model in models:
            try:
                model.engine.lookup.find(request_id, None)
            except RequestNotFoundError:
                continue
            return model
        return self.default

    # --- changes at run time ----------------------------------------------------------------------------------------

    async def load(self, config: ServingConfig) -> None:
        """Load a model. Return when all its replicas are ready. Raise LLMServingError if it cannot be served."""
        name = config.model.model_name
        if name in self._models:
            raise RequestError(QUERY, f"is loaded already; POST /v1/models/{name}/replace replaces it", name)
        with self._changing_to(config):
            self._models[name] = await self._open_ready(config)
        logger.info("model %s is loaded", name)

    async def replace(self, config: ServingConfig) -> None:
        """Load a model again with its adapters. When it is ready, it gets all new requests and the old one drains."""
        before = self.check_served(config.model.model_name)
        with self._changing_to(config), before.engine.lifecycle.exclusive():
            _check_serves(before)
            after = await self._open_ready(config)
            await _carry_adapters(before.engine, after.engine)
            after.engine.metrics.http = before.engine.metrics.http
            self._models[before.name] = after
            self._drain(before)
        logger.info("model %s was replaced; its former replicas finish %d requests", before.name, before.num_open)

    def unload(self, name: str) -> None:
        """Refuse new requests of a model, and stop it after its last request."""
        model = self.check_served(name)
        if model is self.default:
            raise RequestError(QUERY, "must not be the default model, which answers requests without `model`", name)
        with model.engine.lifecycle.exclusive():
            _check_serves(model)
            del self._models[name]
            self._drain(model)

    def check_served(self, name: str) -> ServedModel:
        """Return the model with this name, not an alias. Raise ModelNotFoundError if it is not loaded."""
        if name not in self._models:
            raise ModelNotFoundError("model", f"must be one of the served models: {', '.join(self._models)}", name)
        return self._models[name]

    def check_names(self, field: str, names: Iterable[str], besides: str) -> None:
        """Raise RequestError for `field` if a model (except `besides`) or one of its adapters has one of `names`."""
        used = [(model.name, {*names_of(model.engine.config), *model.engine.adapters.by_name}) for model in self]
        used += [(name, {*all_names_of(config)}) for name, config in self._changing.items()]
        for owner, taken in used:
            if owner != besides and (common := taken & {*names}):
                shared = ", ".join(map(shorten, sorted(common)))
                raise RequestError(field, f"must not share names with the model {owner}: {shared}")

    @contextlib.contextmanager
    def _changing_to(self, config: ServingConfig) -> Iterator[None]:
        """Return a context that reserves the names of a model being loaded. Raise RequestError if they are taken."""
        name = config.model.model_name
        if name in self._changing:
            raise RequestError(QUERY, "is being loaded by another request", name)
        self.check_names(QUERY, all_names_of(config), name)
        self._changing[name] = config
        try:
            yield
        finally:
            del self._changing[name]

    async def _open_ready(self, config: ServingConfig) -> ServedModel:
        """Load a model and return it when it is ready. Loads run one by one, because each checks the free memory."""
        assert self._open is not None
        name = config.model.model_name
        async with self._turn:
            opened: OpenedModel | None = None
            try:
                reserved = sum(map(_uncommitted_bytes, (*self, *self._drains.values())))
                opened = await asyncio.to_thread(self._open, config, reserved)
                model = self._made(opened)
            except ConfigError as error:
                if opened is not None:
                    opened.close()
                raise RequestError(QUERY, f"cannot be loaded: {error}", name) from None
            model.routes.batches = self.default.routes.batches
            self._loading.add(model)
            model.start()
            while not (model.is_ready or (failures := opened.engine.replicas.load_failures) or self._is_ending):
                await asyncio.sleep(POLL_S)
            self._loading.discard(model)
            if not model.is_ready:
                await model.stop()
                why = "; ".join(failures) or "the server is shutting down"
                raise UnavailableError(f"model {name} was not loaded: {why}")
            self.on_ready(opened.engine)
            return model

    def _drain(self, model: ServedModel) -> None:
        model.engine.on_failure = lambda: None  # a failure of a model that drains does not end the server
        task = asyncio.create_task(model.drain())
        self._drains[task] = model
        task.add_done_callback(self._drains.pop)

    # --- the server -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        for model in self:
            model.start()

    async def stop(self) -> None:
        draining = dict(self._drains)
        for task in draining:
            task.cancel()
        for model in (*self, *draining.values(), *self._loading):
            await model.stop()

    def begin_shutdown(self) -> None:
        """End what would delay the stop: /v1/live streams, model loads, and requests of paused or sleeping models."""
        self._is_ending = True
        for model in (*self, *self._drains.values()):
            model.routes.live.close()
            model.engine.lifecycle.begin_shutdown()


def models_shown(http_request: Request) -> ServedModels | None:
    """Return all models, for a route that shows every model. None if there is only one, or the query selects one."""
    models: ServedModels | None = http_request.app.models
    return None if SELECTED_KEY in http_request.scope else models


def health_of_all(models: ServedModels) -> EngineHealth:
    healths = {model.name: model.engine.health() for model in models}
    text = "; ".join(f"{name}: {health.detail}" for name, health in healths.items())
    each = healths.values()
    return EngineHealth(any(health.ready for health in each), text, any(health.loading for health in each))


async def _carry_adapters(before: AsyncEngine, after: AsyncEngine) -> None:
    carried: set[str] = set()
    while missing := [
        each for each in before.adapters.by_name.values() if each.name not in {*after.adapters.by_name, *carried}
    ]:
        for each in missing:
            carried.add(each.name)
            try:
                adapter = await asyncio.to_thread(after.adapters.read, each.name, each.folder)
                after.control.add_adapter(after.adapters, adapter)
            except ModelError as error:
                logger.error("adapter %s cannot be loaded into the new model: %s", each.name, error)
    for name in carried - {*before.adapters.by_name}:  # unloaded meanwhile
        if (removed := after.adapters.remove(name)) is not None:
            after.control.drop_adapter(after.adapters, removed)


def _uncommitted_bytes(model: ServedModel) -> int:
    """Return the bytes of KV cache that a model's WorkAgents have reserved but not written yet."""
    read = [each() for each in model.engine.metrics.memory.values()]
    return sum(each.reserved - each.committed for each in read if each.resident)  # 0: the WorkAgent has exited


def _check_serves(model: ServedModel) -> None:
    """Raise RequestError if the model is paused or asleep: its requests would wait, and a drain would never end."""
    if (gate := model.engine.lifecycle.gate) is not None:
        raise RequestError(QUERY, f"cannot be changed: {gate.reason}. Resume it or wake it up first", model.name)


class _ModelField(msgspec.Struct):
    model: Any = None


def _model_field(body: bytes) -> str | None:
    try:
        name = msgspec.json.decode(body, type=_ModelField).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return name if isinstance(name, str) else None
