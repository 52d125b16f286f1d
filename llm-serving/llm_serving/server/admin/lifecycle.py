"""Routes for administrators: pause and resume generation, sleep and wake up, replace the weights."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, get_args

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.engine.lifecycle import DROP_WEIGHTS, NewRequests, Running
from llm_serving.errors import ModelError, RequestError
from llm_serving.models.gguf import is_gguf
from llm_serving.models.weight_reader import check_replacement
from llm_serving.server.endpoint import Endpoints
from llm_serving.server.idempotency.store import ModelState
from llm_serving.server.middleware.authentication import check_operator
from llm_serving.server.parsing.headers import query_integer
from llm_serving.server.parsing.offload import json_response
from llm_serving.server.receipts import ReceiptHook

VERSION_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
RUNNING: Final = get_args(Running)
NEW_REQUESTS: Final = get_args(NewRequests)
CHOICES: Final[Mapping[str, Mapping[str, Any]]] = {
    "running": {"type": "string", "enum": RUNNING},
    "new_requests": {"type": "string", "enum": NEW_REQUESTS},
}
"""Query parameter -> JSON schema: what happens to accepted (`running`) and new requests. The default is first."""

ENDPOINTS: Final = Endpoints()


class Sleeping(Struct):
    is_sleeping: bool
    level: int
    """0: awake; 1: the KV cache is dropped; 2: the weights are dropped too."""
    state: str
    """Why new requests wait or are refused. Empty if they are accepted."""


class WeightsReplaced(Struct):
    version: str
    weights: str


@ENDPOINTS.add("POST", "/v1/pause", "Pause generation", answer=Sleeping, query=CHOICES)
async def pause(engine: AsyncEngine, http_request: Request) -> Response:
    """Make new requests wait or refuse them, as the query `new_requests` says. Respond once accepted requests have
    finished, are aborted or are frozen, as the query `running` says.
    """
    check_operator(http_request)
    await engine.lifecycle.pause(_choice(http_request, "running", RUNNING), _new_requests(http_request))
    return _state(engine)


@ENDPOINTS.add("POST", "/v1/resume", "Resume generation", answer=Sleeping)
async def resume(engine: AsyncEngine, http_request: Request) -> Response:
    check_operator(http_request)
    await engine.lifecycle.resume()
    return _state(engine)


@ENDPOINTS.add(
    "POST",
    "/v1/sleep",
    "Drop the KV cache and, at level 2, the weights",
    answer=Sleeping,
    query={"level": {"type": "integer", "minimum": 1, "maximum": DROP_WEIGHTS}, **CHOICES},
)
async def sleep(engine: AsyncEngine, http_request: Request) -> Response:
    """Stop accepted requests as the query `running` says, then drop the KV cache and, at level 2, the weights."""
    check_operator(http_request)
    level = query_integer(http_request, "level", 1, DROP_WEIGHTS)
    running = _choice(http_request, "running", RUNNING)
    await engine.lifecycle.sleep(level, running, _new_requests(http_request))
    return _state(engine)


@ENDPOINTS.add("POST", "/v1/wake_up", "Serve again after sleep", answer=Sleeping)
async def wake_up(engine: AsyncEngine, http_request: Request) -> Response:
    check_operator(http_request)
    await engine.lifecycle.wake_up()
    return _state(engine)


@ENDPOINTS.add("GET", "/v1/is_sleeping", "Show whether the model sleeps", answer=Sleeping)
async def show_sleeping(engine: AsyncEngine, http_request: Request) -> Response:
    return _state(engine)


@ENDPOINTS.add(
    "POST",
    "/v1/update_weights",
    "Replace the weights by those of another folder",
    answer=WeightsReplaced,
    query={"version": {"type": "string"}, **CHOICES},
)
async def update_weights(engine: AsyncEngine, http_request: Request) -> Response:
    """Serve the weights of a folder in `model_config.weights_folder`. Respond once all WorkAgents have loaded them. The
    new weights must have the architecture, configuration and shapes of the old ones. The prefix cache is dropped.
    """
    check_operator(http_request)
    folder = _folder(engine, http_request.query_params.get("version", ""))
    try:
        await asyncio.to_thread(check_replacement, folder, engine.model_spec)
    except ModelError as error:
        raise RequestError("version", f"must name weights that can replace the served ones: {error}") from None
    running = _choice(http_request, "running", RUNNING[:2])
    weights = await engine.lifecycle.replace_weights(folder, running, _new_requests(http_request))
    model = engine.config.model
    tokenizer = model.tokenizer_path or model.model_path
    served_now = replace(engine.config, model=replace(model, model_path=folder, tokenizer_path=tokenizer))
    http_request.app.receipts, http_request.app.model_state = ReceiptHook(served_now), ModelState(served_now)
    http_request.app.receipts.start()
    return json_response(WeightsReplaced(folder.name, weights))


def _folder(engine: AsyncEngine, name: str) -> Path:
    parent = engine.config.model.weights_folder
    if parent is None:
        raise RequestError("version", "can be given only with `model_config.weights_folder`", name)
    if not engine.lifecycle.can_replace_weights:
        rule = "can be given only if local WorkAgents read the weights from a folder, not from a GGUF file or a graph"
        raise RequestError("version", rule, name)
    if not VERSION_NAME.fullmatch(name):
        rule = "must be 1 to 128 letters, digits and ._-, the name of a folder in model_config.weights_folder"
        raise RequestError("version", rule, name)
    folder = parent / name
    if is_gguf(folder) and folder.is_file():
        raise RequestError("version", "must be a folder with safetensors: a GGUF file cannot replace weights", name)
    if not folder.is_dir() or folder.resolve().parent != parent.resolve():
        raise RequestError("version", "must be the name of a folder in model_config.weights_folder", name)
    return folder


def _choice(http_request: Request, name: str, values: Sequence[str]) -> Any:
    given = http_request.query_params.get(name, values[0])
    if given not in values:
        raise RequestError(name, f"must be one of {', '.join(values)}", given)
    return given


def _new_requests(http_request: Request) -> Any:
    return _choice(http_request, "new_requests", NEW_REQUESTS)


def _state(engine: AsyncEngine) -> Response:
    lifecycle = engine.lifecycle
    reason = "" if lifecycle.gate is None else lifecycle.gate.reason
    return json_response(Sleeping(lifecycle.level > 0, lifecycle.level, reason))
