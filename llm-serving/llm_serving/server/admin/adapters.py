"""Routes for administrators: load and unload adapters while the server runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from llm_serving.config.rules import MODEL_NAME
from llm_serving.engine.async_engine import AsyncEngine
from llm_serving.errors import ModelError, ModelNotFoundError, RequestError
from llm_serving.server.endpoint import Endpoint
from llm_serving.server.middleware.authentication import check_operator
from llm_serving.server.parsing.body import read_fields
from llm_serving.server.parsing.offload import json_response
from llm_serving.server.protocols.openai.schemas import LoadAdapterRequest, UnloadAdapterRequest
from llm_serving.server.served_models import ServedModels


class AdapterView(Struct):
    name: str
    num_unfinished: int
    """Number of unfinished requests that use the adapter. An unload lets them finish."""


async def load_adapter(engine: AsyncEngine, http_request: Request) -> Response:
    """Load an adapter. New requests may name it once this route has responded."""
    check_operator(http_request)
    body = await read_fields(engine, http_request, LoadAdapterRequest)
    folder = _folder(engine, body.lora_path)
    try:
        MODEL_NAME.parse(body.lora_name)
    except ValueError:
        raise RequestError("lora_name", MODEL_NAME.text, body.lora_name) from None
    model = engine.config.model
    if body.lora_name in (model.model_name, *model.model_aliases, *engine.adapters.by_name):
        raise RequestError("lora_name", "must not be the name of the model or of a loaded adapter", body.lora_name)
    models: ServedModels | None = http_request.app.models
    if models is not None:
        models.check_names("lora_name", [body.lora_name], model.model_name)
    try:
        adapter = await asyncio.to_thread(engine.adapters.read, body.lora_name, folder)
        engine.control.add_adapter(engine.adapters, adapter)
    except ModelError as error:
        raise RequestError("lora_path", f"must be an adapter that the model can use: {error}") from None
    return json_response(AdapterView(adapter.name, 0))


async def unload_adapter(engine: AsyncEngine, http_request: Request) -> Response:
    """Refuse new requests for an adapter. Free its memory when the requests that use it have ended."""
    check_operator(http_request)
    body = await read_fields(engine, http_request, UnloadAdapterRequest)
    adapter = engine.adapters.remove(body.lora_name)
    if adapter is None:
        raise ModelNotFoundError("lora_name", "must be the name of a loaded adapter", body.lora_name)
    return json_response(AdapterView(adapter.name, engine.control.drop_adapter(engine.adapters, adapter)))


def _folder(engine: AsyncEngine, given: str) -> Path:
    """Return the folder of an adapter. Raise RequestError unless it is inside `lora_folder`."""
    if engine.config.lora.lora_folder is None:
        raise RequestError("lora_path", "cannot be loaded: lora_config.lora_folder is not set")
    if (folder := engine.config.lora.folder_of(given)) is not None:
        return folder
    raise RequestError("lora_path", "must be a folder inside lora_config.lora_folder")


ENDPOINTS: Final = (
    Endpoint(
        "POST",
        "/v1/load_lora_adapter",
        load_adapter,
        "Load an adapter",
        body=LoadAdapterRequest,
        answer=AdapterView,
    ),
    Endpoint(
        "POST",
        "/v1/unload_lora_adapter",
        unload_adapter,
        "Unload an adapter",
        body=UnloadAdapterRequest,
        answer=AdapterView,
    ),
)
