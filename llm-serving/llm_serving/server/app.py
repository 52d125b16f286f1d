"""Builds the ASGI application of an engine, and runs the HTTP server until a signal arrives."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import InitVar, dataclass, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path

from msgspec import json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from llm_serving.config.schema import ServingConfig
from llm_serving.core.files import lock_folder
from llm_serving.core.process import describe_address_space_limit, periodic_heap_trim, return_large_blocks
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import RequestError
from llm_serving.log import get_logger
from llm_serving.server.admin.advice import Advisor
from llm_serving.server.admin.live import LiveFeed
from llm_serving.server.batches.internal_client import InternalClient
from llm_serving.server.batches.runner import Ask, Batches
from llm_serving.server.batches.store import BatchStore
from llm_serving.server.generation.response import ResponseBuffers
from llm_serving.server.http.listener import OpenFiles, bind
from llm_serving.server.http.server import HttpServer, check_variables
from llm_serving.server.idempotency.store import AcceptedRequests, LogFile, ModelState
from llm_serving.server.middleware.access_log import AccessLog, Accounting, open_access_log
from llm_serving.server.middleware.authentication import ApiKeyAuthentication
from llm_serving.server.middleware.browser_origins import BrowserGuard
from llm_serving.server.middleware.rate_limits import Quota, update_quotas
from llm_serving.server.middleware.tracing import Tracer, send_to
from llm_serving.server.openapi import DOCUMENT_PATH, openapi_document
from llm_serving.server.parsing.offload import json_response
from llm_serving.server.protocols.openai.response_store import ResponseStore
from llm_serving.server.protocols.openai.schemas import ErrorDetail, ErrorResponse
from llm_serving.server.receipts import ReceiptHook
from llm_serving.server.routes import ENDPOINTS
from llm_serving.server.served_models import OpenedModel, OpenModel, ServedModels
from llm_serving.server.tenant_quota import TenantQuota
from llm_serving.server.ui import page_routes

logger = get_logger(__name__)


@dataclass(frozen=True)
class Site:
    public: Accounting
    internal: InternalClient
    models: ServedModels

    @property
    def routes(self) -> Application:
        return self.models.default.routes


def create_app(engine: AsyncEngine, access_log: AccessLog | None = None) -> Accounting:
    return build_site(engine, access_log).public


def build_site(
    engine: AsyncEngine,
    access_log: AccessLog | None = None,
    tracer: Tracer | None = None,
    accepted: AcceptedRequests | None = None,
    others: Sequence[OpenedModel] = (),
    open_model: OpenModel | None = None,
) -> Site:
    """Return the HTTP application of `engine` and the models `others`. `open_model` adds models at run time."""
    keys = engine.config.api_keys
    document = _encoded_document(with_keys=bool(keys))
    page = page_routes() if engine.config.serving.ui else []
    open_paths = frozenset(endpoint.path for endpoint in ENDPOINTS if not endpoint.needs_key)
    responses = ResponseStore(tenant_quota_of(engine, "response_store_bytes"))
    accepted = open_accepted(engine) if accepted is None else accepted
    buffers = ResponseBuffers(engine.config.serving.max_buffered_response_bytes)
    refused, quotas = engine.metrics.http.refused, dict[str, Quota]()
    update_quotas(quotas, keys, engine.clock)

    async def show_openapi(request: Request) -> Response:
        return Response(document, media_type="application/json")

    def routes_of(engine: AsyncEngine) -> Application:
        policy = engine.config.scheduler.policy
        routes = Application(
            [*(endpoint.route(engine) for endpoint in ENDPOINTS), Route(DOCUMENT_PATH, show_openapi), *page],
            responses,
            ReceiptHook(engine.config),
            LiveFeed(engine.lookup, engine.metrics, policy, engine.config.serving.max_live_viewers, engine.clock),
            accepted,
            ModelState(engine.config),
            Advisor(lambda: engine.config, engine.clock, refused=lambda since: engine.refused_since(since)),
            buffers,
        )

        def apply_config(config: ServingConfig) -> None:
            if authentication is not None:
                authentication.reload(config.api_keys)
            update_quotas(quotas, config.api_keys, engine.clock)
            client.keys = {key.name: key for key in config.api_keys}
            routes.live.policy = config.scheduler.policy
            buffers.max_bytes = config.serving.max_buffered_response_bytes

        engine.reloading.followers.append(apply_config)
        if open_model is not None:
            routes.models = models
        return routes

    models = ServedModels(ENDPOINTS, routes_of, open_model)
    for each in (OpenedModel(engine), *others):
        models.add(each)
    routes: ASGIApp = models.default.routes if open_model is None else models
    paths = frozenset((DOCUMENT_PATH, *(endpoint.path for endpoint in ENDPOINTS)))
    internal = Accounting(routes, engine.clock, engine.metrics.http, access_log, paths, tracer)
    application: ASGIApp = routes
    authentication: ApiKeyAuthentication | None = None
    if keys:
        open_pages = frozenset(each.path for each in page)
        application = authentication = ApiKeyAuthentication(
            application, keys, open_paths, open_pages, clock=engine.clock, quotas=quotas, refused=refused
        )
    application = BrowserGuard(application, engine.config.serving, needs_keys=bool(keys), refused=refused)
    public = Accounting(application, engine.clock, engine.metrics.http, access_log, paths, tracer)
    client = InternalClient(
        internal, {key.name: key for key in keys}, quotas, lambda: any(model.engine.health().ready for model in models)
    )
    return Site(public, client, models)


@functools.cache
def _encoded_document(*, with_keys: bool) -> bytes:
    return json.encode(openapi_document(ENDPOINTS, with_keys=with_keys))


@dataclass(eq=False)
class Application:
    """Passes a request to its route. Unlike Starlette, it does not wrap `send`, which would slow each chunk."""

    routes: InitVar[Sequence[Route]]
    responses: ResponseStore
    receipts: ReceiptHook
    live: LiveFeed
    accepted: AcceptedRequests
    model_state: ModelState
    advisor: Advisor
    response_buffers: ResponseBuffers
    batches: Batches | None = None
    models: ServedModels | None = None

    def __post_init__(self, routes: Sequence[Route]) -> None:
        self._router = Router(routes, redirect_slashes=False)  # a redirect would repeat the client's Host header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # makes the router raise HTTPException
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            rule = f"{HTTPStatus(error.status_code).phrase.lower()}: this server has no such route and method"
            content = ErrorResponse(ErrorDetail(rule, "invalid_request_error", None, None))
            await json_response(content, error.status_code, dict(error.headers or {}))(scope, receive, send)


def serve(engine: AsyncEngine, others: Sequence[OpenedModel] = (), open_model: OpenModel | None = None) -> int:
    """Start the engine, serve HTTP on the configured address, and stop the engine. Return 0 after an orderly end. The
    port is bound first; `/health` responds with 503 while the engine loads. Signals act as in `HttpServer.run_within`.
    Raise ConfigError if configuration or environment do not allow serving, or the error of an engine that has failed.
    """
    serving = engine.config.serving
    check_variables(serving)
    engines = [engine, *(each.engine for each in others)]
    files = OpenFiles(sum(each.config.num_processes for each in engines))
    files.raise_limit(serving)
    if (limit := describe_address_space_limit()) is not None:
        logger.warning("%s", limit)
    return_large_blocks()
    tune_interpreter()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bind(serving.server_ip, serving.server_port))
        locked: set[Path] = set()

        def lock(config: ServingConfig) -> None:
            if (folder := config.scheduler.record_path) is not None and folder not in locked:
                stack.callback(os.close, lock_folder(folder, "scheduler_config.record_path"))
                locked.add(folder)

        def open_locked(config: ServingConfig, reserved_bytes: int) -> OpenedModel:
            assert open_model is not None
            lock(config)
            return open_model(config, reserved_bytes)

        for each in engines:
            lock(each.config)
        access_log, close_log = open_access_log(serving)
        endpoint = serving.otlp_endpoint
        tracer = None if endpoint is None else Tracer(send_to(endpoint), engine.config.model.model_name)
        request_log: LogFile | None = None
        try:
            if serving.request_log == "disk" and serving.request_log_path is not None:
                request_log = LogFile(serving.request_log_path, serving.request_log_bytes)
            accepted = open_accepted(engine, request_log)
            site = build_site(engine, access_log, tracer, accepted, others, open_model and open_locked)
            reload = partial(_reload_files, site.models, access_log)
            begin_shutdown = site.models.begin_shutdown
            server = HttpServer(site.public, listener, serving, site.public.refused, reload, begin_shutdown, files)

            def follow(engine: AsyncEngine) -> None:
                engine.reloading.followers.append(lambda config: server.reload_limits(config.serving))
                engine.on_failure = server.end

            for each in engines:
                follow(each)
            site.models.on_ready = follow
            with periodic_heap_trim():
                server.run_within(_running(engine, site))
        finally:
            close_log()
            if tracer is not None:
                tracer.close()
            if request_log is not None:
                request_log.close()
    for model in site.models:
        if model.engine.failure is not None:
            raise model.engine.failure
    return 0


async def _reload_files(models: ServedModels, access_log: AccessLog | None) -> None:
    if access_log is not None:
        access_log.reopen()
    for engine in (model.engine for model in models):
        if engine.config.origin is not None and engine.config.origin.path is not None:
            with contextlib.suppress(RequestError):  # the reloader has logged it
                await engine.reloading.reload()


def tune_interpreter() -> None:
    """Make garbage collections rare, and let a waiting event loop get the GIL after 0.5 ms."""
    gc.freeze()
    # A burst of 128 requests allocates about 20,000 objects that stay in use. With a lower first threshold, the
    # collector would search them in vain. Full collections take 0.1 s with many connections.
    gc.set_threshold(20_000, 1, 20)
    sys.setswitchinterval(0.0005)  # Python's default is 5 ms


@asynccontextmanager
async def _running(engine: AsyncEngine, site: Site) -> AsyncIterator[None]:
    site.models.start()
    batches = open_batches(engine, site.internal)
    for model in site.models:
        model.routes.batches = batches
    if batches is not None:
        await batches.start()
    try:
        yield
    finally:
        if batches is not None:
            await batches.stop()
        await site.models.stop()


def tenant_quota_of(engine: AsyncEngine, key: str) -> TenantQuota:
    """Return the quota that divides a store among tenants. `key`: field of `serving_config` with the total bytes."""
    limit = getattr(engine.config.serving, key)
    return TenantQuota(limit, lambda: len(engine.config.api_keys) > 1, f"serving_config.{key}")


def open_accepted(engine: AsyncEngine, log: LogFile | None = None) -> AcceptedRequests:
    """Return the store of accepted requests, which clients may retry or resume. It reads and extends the file `log`."""
    serving, quota = engine.config.serving, tenant_quota_of(engine, "request_log_bytes")
    if serving.request_log == "none":
        quota = replace(quota, num_bytes=0)
    accepted = AcceptedRequests(quota, serving.request_log_age_s, time.time)
    if log is not None:
        for record in log.read():
            accepted.restore(record)
        accepted.log = log
    return accepted


def open_batches(engine: AsyncEngine, ask: Ask, path: Path | None = None) -> Batches | None:
    """Open the configured batch database, or the one at `path`, whose answers have no size limit. Return None if
    neither is given. `ask` sends a line's request to the server's routes. Raise ConfigError if the database cannot be
    used.
    """
    config, serving = engine.config, engine.config.serving
    database = path or serving.batch_path
    if database is None:
        return None
    quota = tenant_quota_of(engine, "batch_store_bytes")
    return Batches(
        partial(BatchStore, database, quota),
        ask,
        concurrency=serving.batch_concurrency or config.model.decode_batch_size,
        priority_class=config.request_classes[-1].name,
        shares=quota,
        bounds_answers=path is None,
    )
