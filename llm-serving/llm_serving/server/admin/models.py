"""Routes for administrators: load, unload and replace models and adapters while the server runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.config.reload import read_all_again, row_of
from llm_serving.config.rules import MODEL_NAME
from llm_serving.config.schema import ServingConfig
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import ConfigError, ModelError, ModelNotFoundError, RequestError
from llm_serving.server.endpoint import Endpoints
from llm_serving.server.middleware.authentication import check_operator
from llm_serving.server.parsing.body import read_fields
from llm_serving.server.parsing.offload import json_response
from llm_serving.server.protocols.openai.schemas import LoadAdapterRequest, UnloadAdapterRequest
from llm_serving.server.served_models import ServedModels

ENDPOINTS: Final = Endpoints()


class ModelChanged(Struct):
    model: str
    state: str
    """ready: the model accepts requests; draining: it finishes its requests and then stops."""


@ENDPOINTS.add("POST", "/v1/models/{model:path}/load", "Load a model of the YAML", answer=ModelChanged)
async def load_model(engine: AsyncEngine, http_request: Request) -> Response:
    """Read the YAML again, and load a model of its section `models`. Respond when all its replicas are ready."""
    models, name = _models(http_request), http_request.path_params["model"]
    await models.load(await _config(engine, name))
    return json_response(ModelChanged(name, "ready"))


@ENDPOINTS.add("POST", "/v1/models/{model:path}/replace", "Load a model again", answer=ModelChanged)
async def replace_model(engine: AsyncEngine, http_request: Request) -> Response:
    models, name = _models(http_request), http_request.path_params["model"]
    models.check_served(name)
    await models.replace(await _config(engine, name))
    return json_response(ModelChanged(name, "ready"))


@ENDPOINTS.add("POST", "/v1/models/{model:path}/unload", "Stop serving a model", answer=ModelChanged)
async def unload_model(engine: AsyncEngine, http_request: Request) -> Response:
    models, name = _models(http_request), http_request.path_params["model"]
    models.unload(name)
    return json_response(ModelChanged(name, "draining"))


def _models(http_request: Request) -> ServedModels:
    check_operator(http_request)
    models: ServedModels | None = http_request.app.models
    if models is None:
        raise RequestError("model", "can be loaded, replaced or unloaded only if the YAML has the section `models`")
    return models


async def _config(engine: AsyncEngine, name: str) -> ServingConfig:
    """Read a model's configuration from the YAML, not from the request, so that no client can choose paths."""
    try:
        return row_of(await asyncio.to_thread(read_all_again, engine.config), name)
    except ConfigError as error:
        raise RequestError("model", f"cannot be loaded: {error}") from None


class AdapterView(Struct):
    name: str
    num_unfinished: int
    """Unfinished requests that use the adapter. An unload lets them finish."""


@ENDPOINTS.add("POST", "/v1/load_lora_adapter", "Load an adapter", body=LoadAdapterRequest, answer=AdapterView)
async def load_adapter(engine: AsyncEngine, http_request: Request) -> Response:
    """Load an adapter. New requests may name it once this route has responded."""
    check_operator(http_request)
    body = await read_fields(engine, http_request, LoadAdapterRequest)
    folder = _folder(engine, body.lora_path)
    try:
        MODEL_NAME.parse(body.lora_name)
    except ValueError:
        raise RequestError("lora_name", MODEL_NAME.text, body.lora_name) from None
    model, models = engine.config.model, http_request.app.models
    try:
        adapter = await asyncio.to_thread(engine.adapters.read, body.lora_name, folder)
        # Check the name after the read, during which another request may have loaded the same name.
        if body.lora_name in (model.model_name, *model.model_aliases, *engine.adapters.by_name):
            raise RequestError("lora_name", "must not be the name of the model or of a loaded adapter", body.lora_name)
        if models is not None:
            models.check_names("lora_name", [body.lora_name], model.model_name)
        engine.control.add_adapter(engine.adapters, adapter)
    except ModelError as error:
        raise RequestError("lora_path", f"must be an adapter that the model can use: {error}") from None
    return json_response(AdapterView(adapter.name, 0))


@ENDPOINTS.add("POST", "/v1/unload_lora_adapter", "Unload an adapter", body=UnloadAdapterRequest, answer=AdapterView)
async def unload_adapter(engine: AsyncEngine, http_request: Request) -> Response:
    """Refuse new requests for an adapter. Free its memory when the requests that use it have ended."""
    check_operator(http_request)
    body = await read_fields(engine, http_request, UnloadAdapterRequest)
    adapter = engine.adapters.remove(body.lora_name)
    if adapter is None:
        raise ModelNotFoundError("lora_name", "must be the name of a loaded adapter", body.lora_name)
    return json_response(AdapterView(adapter.name, engine.control.drop_adapter(engine.adapters, adapter)))


def _folder(engine: AsyncEngine, given: str) -> Path:
    if engine.config.lora.lora_folder is None:
        raise RequestError("lora_path", "cannot be loaded: lora_config.lora_folder is not set")
    if (folder := engine.config.lora.folder_of(given)) is not None:
        return folder
    raise RequestError("lora_path", "must be a folder inside lora_config.lora_folder")
